"""Recovery from memory: snapshots of a training that outlive its ranks, and the way back from them.

memory_folder     the private folder on /dev/shm that holds a node's snapshots
memory_key        the random key that names it
generation        one rank's snapshot: a data file, and a record with its contents and checksums
copying           copies of tensors to the host while training computes
two_generations   one rank's snapshots, written in turn
cadence           how often: the cost stays below 1% of the time
finding           the newest generation that is whole, over all ranks and nodes
restoring         fills the model and the optimizer from it
buddies           copies on another node
recovery          all of it, for one training
newest            memory or disk, whichever is newer
protect           the interface for users
"""
