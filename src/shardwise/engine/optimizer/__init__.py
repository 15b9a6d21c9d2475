"""Optimizers of a prepared model: slices and matrices that they step, their states, and the fp16 scaler."""
