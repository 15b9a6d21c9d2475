"""Datasets of tokens and images.

A dataset is any `torch.utils.data.Dataset` with a length whose samples are (input, target) pairs.
"""
