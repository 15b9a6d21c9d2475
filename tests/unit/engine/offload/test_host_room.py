"""Host memory that a plan needs, and that there is."""

import pytest
import torch

from shardwise.base.errors import InvalidPlan
from shardwise.engine.offload import host_room
from shardwise.engine.offload.host_room import check_host_room
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh
from shardwise.program.spec import ROOT, ModelSpec, TensorSpec, UnitSpec

ONE_GIB = 2**30
SPEC = ModelSpec(
    name="one unit",
    units=(UnitSpec(name=ROOT, class_name="Model", params=(TensorSpec(name="weight", shape=(ONE_GIB,)),)),),
    call_order=(ROOT,),
)


def check(plan: Plan, *, free_bytes: int, num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_room, "free_host_bytes", lambda: free_bytes)
    placements = plan.placements([ROOT])
    check_host_room(SPEC, plan=plan, placements=placements, mesh=Mesh(shard=num_ranks), device=torch.device("cpu"))


def test_states_that_do_not_fit_into_host_memory_are_an_error_before_the_kernel_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Master, two moments, gradient and the bf16 copy: 18 bytes of each of the parameters that a rank steps.
    plan = Plan(strategy="fsdp", precision="bf16", offload_states=True, offload_update="host")
    check(plan, free_bytes=9 * ONE_GIB, num_ranks=2, monkeypatch=monkeypatch)
    with pytest.raises(InvalidPlan, match=r"1 x 9.00 GiB .* 8.90 GiB of memory available"):
        check(plan, free_bytes=int(8.9 * ONE_GIB), num_ranks=2, monkeypatch=monkeypatch)


def test_gradients_that_stay_on_the_device_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(strategy="fsdp", precision="bf16", offload_states=True)
    check(plan, free_bytes=7 * ONE_GIB, num_ranks=2, monkeypatch=monkeypatch)
    with pytest.raises(InvalidPlan, match=r"1 x 7.00 GiB .* 6.90 GiB of memory available"):
        check(plan, free_bytes=int(6.9 * ONE_GIB), num_ranks=2, monkeypatch=monkeypatch)


def test_a_plan_that_replaces_another_uses_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(strategy="fsdp", offload_states=True)
    monkeypatch.setattr(host_room, "free_host_bytes", lambda: 5 * ONE_GIB)
    form = {"placements": plan.placements([ROOT]), "mesh": Mesh(shard=1), "device": torch.device("cpu")}
    check_host_room(SPEC, plan=plan, held_bytes=7 * ONE_GIB, **form)
    with pytest.raises(InvalidPlan, match=r"1 x 12.0 GiB .* 11.0 GiB of memory available"):
        check_host_room(SPEC, plan=plan, held_bytes=6 * ONE_GIB, **form)


def test_states_on_the_device_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    check(Plan(strategy="fsdp"), free_bytes=0, num_ranks=1, monkeypatch=monkeypatch)
