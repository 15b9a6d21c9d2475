"""Copies between device and host memory, for offloaded states and activations."""
