"""The rendezvous of an agent that is alone, for torch's elastic agent."""

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from shardwise.base.torch_internals.torch_private import HashStore


class OneMachine(RendezvousHandler):
    """The rendezvous of a single agent: complete at once, in memory."""

    def next_rendezvous(self) -> RendezvousInfo:
        # The ranks do not use this address: they meet over a file.
        unused = RendezvousStoreInfo(master_addr="127.0.0.1", master_port=0)
        return RendezvousInfo(HashStore(), 0, 1, unused)

    def get_backend(self) -> str:
        return "one-machine"

    def get_run_id(self) -> str:
        return "shardwise"

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: there is no other agent."""

    def shutdown(self) -> bool:
        return True
