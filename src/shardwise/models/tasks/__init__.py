"""A task: a model with its loss, its batches and, for training, its data. Every command takes one.

Your own is python:FILE.py:function: the function returns a Task; its arguments `seq` and `image`, if it has them, are
those of the command line.

task                what a task is, and the losses of our own models
catalogue_task      of our own models
transformers_task   of models of the transformers library
foreign             of models of other libraries, on the meta device
load_task           finds the task that a command names
"""

from shardwise.models.tasks.catalogue_task import image_task, token_task
from shardwise.models.tasks.load_task import load_task
from shardwise.models.tasks.task import Sums, Task, classification_sums, cross_entropy, cross_entropy_of_tokens

__all__ = [
    "Sums",
    "Task",
    "classification_sums",
    "cross_entropy",
    "cross_entropy_of_tokens",
    "image_task",
    "load_task",
    "token_task",
]
