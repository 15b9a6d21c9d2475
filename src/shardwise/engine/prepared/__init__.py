"""What is asked of a prepared model: state dicts, clipping, accumulation, what it holds."""
