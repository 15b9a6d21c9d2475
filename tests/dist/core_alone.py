"""One rank that trains with the engine's core alone: `python core_alone.py RANK NUM_RANKS STORE usual|all`.

Everything else of the engine cannot be imported here. Prints a line for each training that has the bits it must have.
"""

import sys
from importlib.abc import MetaPathFinder
from typing import Any

# All of the engine but its core, and what watches over a job.
SHELL = (
    *("shardwise.engine.guards", "shardwise.engine.graphs", "shardwise.engine.optimizer"),
    *("shardwise.engine.activations", "shardwise.engine.offload", "shardwise.engine.out_of_memory"),
    *("shardwise.engine.plan_change", "shardwise.engine.prepared", "shardwise.engine.prepare"),
    *("shardwise.engine.engine", "shardwise.engine.our_engine", "shardwise.engine.last_issued", "shardwise.engines"),
    *(
        "shardwise.comm.watch.watch",
        "shardwise.comm.watch.stall",
        "shardwise.comm.watch.record_writer",
        "shardwise.comm.watch.noticeboard",
    ),
)


class _Refuse(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.startswith(SHELL):
            raise ImportError(f"the core imports {name}")


sys.meta_path.insert(0, _Refuse())

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from cases import MODELS, adamw  # noqa: E402
from late import LateCollectives  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

from shardwise.comm.groups.collectives import BackendCollectives  # noqa: E402
from shardwise.engine.core.assembly import assemble  # noqa: E402
from shardwise.plan import Plan  # noqa: E402
from shardwise.plan.placement import STRATEGIES, Mesh  # noqa: E402

NUM_STEPS = 3


def made() -> tuple[nn.Module, Any]:
    torch.manual_seed(1234)
    return MODELS["gpt"]()


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def in_one_process(*, num_ranks: int, num_passes: int) -> dict[str, Tensor]:
    """Each rank's passes summed, then the ranks in order, then the mean over ranks."""
    model, batch = made()
    optimizer = adamw(model.parameters())
    for step in range(NUM_STEPS):
        totals: list[Tensor] = []
        for rank in range(num_ranks):
            model.zero_grad()
            for number in range(num_passes):
                loss_of(model, batch(step + 10 * number, rank)).backward()
            grads = [parameter.grad.clone() for parameter in model.parameters()]
            totals = [total + grad for total, grad in zip(totals, grads, strict=True)] if totals else grads
        for parameter, total in zip(model.parameters(), totals, strict=True):
            parameter.grad = total * (1 / num_ranks)
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def on_core(plan: Plan, *, rank: int, num_passes: int) -> dict[str, Tensor]:
    """The same training by the core, under collectives that are as late as can be."""
    model, batch = made()
    optimizer = adamw(model.parameters())
    late = LateCollectives(BackendCollectives(), seed=rank)
    core = assemble(model, [optimizer], plan, collectives=late, device=torch.device("cpu"))
    for step in range(NUM_STEPS):
        for number in range(num_passes):
            core.setting.passes.accumulating = number + 1 < num_passes
            loss_of(model, batch(step + 10 * number, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    core.wait_gathers()
    masters = {}
    for flat in core.flats:
        for name, view in zip(flat.names, flat.full.views_of(flat.full_master()), strict=True):
            masters[name] = view.clone()
    late.assert_all_waited()
    core.hooks.detach()
    return masters


def main(rank: int, num_ranks: int, store: str, amount: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks)
    references = {passes: in_one_process(num_ranks=num_ranks, num_passes=passes) for passes in (1, 2)}
    for strategy in STRATEGIES:
        ways = [(None, 2), (Mesh(replicate=num_ranks), 1)]
        if amount == "all":
            ways += [(None, 1), (Mesh(replicate=num_ranks), 2)]
        for mesh, passes in ways:
            plan = Plan(strategy=strategy, mesh=mesh, bucket_bytes=4000)
            check(on_core(plan, rank=rank, num_passes=passes), references[passes], f"{strategy} {mesh} {passes}")
    # Last: on a CPU without bf16 torch switches to another library for products, also of fp32, from the first one on.
    in_bf16: dict[str, Tensor] = {}
    for strategy in STRATEGIES if amount == "all" else ("zero2", "fsdp"):
        found = on_core(Plan(strategy=strategy, precision="bf16", bucket_bytes=4000), rank=rank, num_passes=1)
        in_bf16 = in_bf16 or found
        check(found, in_bf16, f"{strategy} bf16")
    dist.destroy_process_group()
    loaded = [name for name in sys.modules if name.startswith(SHELL)]
    assert not loaded, loaded


def check(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert found.keys() == expected.keys()
    different = [name for name, value in found.items() if not torch.equal(value, expected[name])]
    assert not different, f"{what}: {different}"
    print(f"equal: {what}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
