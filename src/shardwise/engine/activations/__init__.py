"""Activations: recompute and offload."""
