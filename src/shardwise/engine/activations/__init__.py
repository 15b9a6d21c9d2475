"""What happens to a unit's forward: recompute, offload, torch.compile."""
