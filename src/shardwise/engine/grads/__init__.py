"""Gradients: the buffers in which they are reduced, and which parameters were used."""
