"""What holds a communicator is let go before the groups are destroyed, whoever destroys them."""

import torch.distributed as dist

from shardwise.comm.leave import let_go_before_leaving


class Graphs:
    def __init__(self) -> None:
        self.groups_were_there: list[bool] = []

    def let_go(self) -> None:
        self.groups_were_there.append(dist.is_initialized())


def test_a_holder_lets_go_while_the_group_is_still_there() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    graphs = Graphs()
    let_go_before_leaving(graphs)
    dist.destroy_process_group()
    assert graphs.groups_were_there == [True]
    assert not dist.is_initialized()


def test_a_holder_is_not_kept_alive_and_the_function_is_replaced_once() -> None:
    let_go_before_leaving(Graphs())
    replaced = dist.destroy_process_group
    let_go_before_leaving(Graphs())
    assert dist.destroy_process_group is replaced is dist.distributed_c10d.destroy_process_group
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
