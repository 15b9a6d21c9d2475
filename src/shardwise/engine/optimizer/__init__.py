"""The optimizer: what a rank steps, and the fp16 scaler."""
