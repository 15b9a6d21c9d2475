"""The state of a training, where it outlives the process that made it.

checkpoint/   on disk or in an object store, loadable under any other plan
recovery/     in the memory of the nodes, for ranks that are started again
"""
