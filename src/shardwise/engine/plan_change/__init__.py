"""Changes of a model in training: another plan, or other parameters."""
