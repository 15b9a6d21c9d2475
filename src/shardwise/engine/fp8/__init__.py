"""Linear layers that multiply in fp8: scales and casts, products, and the layer with its gradients."""
