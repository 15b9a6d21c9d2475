"""Host memory: states that live there, and activations that wait there for backward."""
