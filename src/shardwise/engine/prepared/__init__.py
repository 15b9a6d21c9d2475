"""What is asked of a prepared model: state dicts, clipping, accumulation, capture, what it holds."""
