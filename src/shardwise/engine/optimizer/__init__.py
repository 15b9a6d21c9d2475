"""The optimizer: what a rank steps, and its state whole or in slices."""
