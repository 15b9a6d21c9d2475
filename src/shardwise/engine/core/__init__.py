"""The core: everything that trains a model under a plan, and nothing else."""
