"""Wrappers of a unit's forward: recompute, offload, torch.compile."""
