"""Gradients: buckets, the buffers in which they are reduced, clipping and scaling."""
