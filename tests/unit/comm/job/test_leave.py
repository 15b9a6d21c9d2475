"""Objects that hold a communicator are released before the groups are destroyed, by any caller."""

import torch.distributed as dist

from shardwise.comm.job.leave import release_before_leaving


class Graphs:
    def __init__(self) -> None:
        self.groups_were_there: list[bool] = []

    def release(self) -> None:
        self.groups_were_there.append(dist.is_initialized())


def test_a_holder_lets_go_while_the_group_is_still_there() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    graphs = Graphs()
    release_before_leaving(graphs)
    dist.destroy_process_group()
    assert graphs.groups_were_there == [True]
    assert not dist.is_initialized()


def test_a_holder_is_not_kept_alive_and_the_function_is_torchs_own_without_one() -> None:
    own = dist.destroy_process_group
    graphs = Graphs()
    release_before_leaving(graphs)
    replaced = dist.destroy_process_group
    assert replaced is not own
    release_before_leaving(Graphs())
    assert dist.destroy_process_group is replaced
    del graphs
    assert dist.destroy_process_group is own is dist.distributed_c10d.destroy_process_group
