"""The samples of each rank: the distributed sampler, its permutation, and padding."""
