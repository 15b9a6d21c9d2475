"""Datasets, and the sampler that gives each rank its part of one.

A dataset is any `torch.utils.data.Dataset` with a length whose samples are (input, target).
"""
