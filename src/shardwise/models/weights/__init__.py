"""Checkpoint folders of the transformers library.

pretrained   from_pretrained and save_pretrained for models of any strategy
fine_tune    a folder as a task of `shardwise train`, whole or with LoRA adapters
"""
