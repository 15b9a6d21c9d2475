"""The settings of torch's allocator with which ranks start: segments that expand."""

import os
import sys

import torch

from shardwise.base.vocabulary.segments import expanding_segments


def allocator_settings() -> dict[str, str]:
    """Return the variable that makes segments expand; {} where torch has none or this process's settings decide it."""
    return expanding_segments(os.environ) if torch.version.cuda is not None and sys.platform == "linux" else {}
