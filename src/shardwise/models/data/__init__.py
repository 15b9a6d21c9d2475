"""Datasets, and the sampler that gives each rank its share of the samples.

A dataset is any `torch.utils.data.Dataset` with a length whose samples are (input, target) pairs.
"""
