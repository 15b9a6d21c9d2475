"""Where nothing fits: changes that do, the cheapest for the user first, each with a command that finds its plan."""

import shlex
from dataclasses import replace
from typing import Any

import pytest

from shardwise.base.errors import InvalidModel
from shardwise.doors.cli.plan_answer import PlanQuestion, WayOut, answer
from shardwise.doors.cli.plan_options import PlanOptions
from shardwise.doors.cli.plan_question import question_of
from shardwise.doors.cli.ways_out import LORA_RANK, ways_out
from shardwise.plan.placement import AUTO

ALONE = ("devices", "host memory", "LoRA", "QLoRA", "gradients summed in bf16")


def ways(model: str, cluster: str, **options: Any) -> list[WayOut]:
    """The ways out, as of a model without adapters, which take a trace."""

    def ask(asked: PlanOptions) -> PlanQuestion:
        if asked.lora is not None:
            raise InvalidModel("no adapters")
        return question_of(asked)

    return ways_out(replace(question_of(PlanOptions(model=model, cluster=cluster, **options)), ask=ask))


def kinds(found: list[WayOut]) -> list[str]:
    names = ("another strategy", "--mesh", "recompute", "samples", *ALONE, "engine", "computation")
    return [next(name for name in names if name in way.change) for way in found]


@pytest.mark.parametrize(
    ("model", "options", "first"),
    [
        ("llama-3.1-8b", {"strategy": "ddp", "micro_batch": 1}, "another strategy"),
        ("llama-3.1-8b", {"recompute": "none", "micro_batch": 2}, "recompute"),
        ("llama-3.1-8b", {"micro_batch": 64}, "samples"),
        ("gpt2-1.5b", {"precision": "fp32", "micro_batch": 64}, "samples"),
    ],
)
def test_first_way_out_costs_the_user_the_least(model: str, options: dict[str, Any], first: str) -> None:
    found = ways(model, "8xh100-80gb", **options)
    assert kinds(found)[0] == first
    assert len(found) <= 4
    assert {way.candidate.fits for way in found} == {"yes"}


def test_command_of_a_way_out_recommends_its_plan() -> None:
    for way in ways("gpt2-774m", "2xl4", micro_batch=8, recompute="none"):
        assert way.options.strategy != AUTO, "its answer would be the solver's"
        best = answer(question_of(way.options)).recommendation.best
        assert best == way.candidate
        words = shlex.split(way.options.command)
        assert words[:5] == ["shardwise", "plan", "gpt2-774m", "--cluster", str(way.candidate.cluster)]


def test_fewer_samples_per_pass_come_with_more_passes() -> None:
    found = ways("llama-3.1-8b", "8xh100-80gb", recompute="full", micro_batch=12)[0]
    assert (found.candidate.batch, found.candidate.plan.accumulate) == (6, 2)
    assert found.change == "6 samples per pass, in 2 passes"


@pytest.mark.parametrize(("host", "has_host"), [(None, True), ("110GiB", True), ("50GiB", False), ("0", False)])
def test_host_memory_is_never_more_than_the_machine_has(host: str | None, has_host: bool) -> None:
    found = ways("llama-3.1-8b", "1xh100-80gb", host_memory=host)
    assert kinds(found)[0] == "devices"
    assert ("host memory" in kinds(found)) is has_host
    for way in found:
        # A listed machine has 116 GiB per H100.
        most = 116 if host is None else int(host.removesuffix("GiB"))
        assert way.candidate.node_host_bytes <= most * way.candidate.cluster.num_ranks * 2**30
    assert kinds(found)[-1] != "gradients summed in bf16" or len(found) == 4


def test_more_devices_with_states_in_host_memory_need_no_more_of_it_than_their_machines_have() -> None:
    # 920 GiB, of which two of the listed machines' shares are 514.
    first, *_ = ways("llama-3.1-70b", "1xh200", offload="states", micro_batch=1, recompute="full")
    assert first.candidate.cluster.num_ranks == 4
    assert first.candidate.node_host_bytes <= 4 * 257 * 2**30


def test_lower_precision_of_reductions_is_last() -> None:
    found = ways("gpt2-1.5b", "1xl4", budget="13GiB", host_memory="0")
    assert "gradients summed in bf16" not in kinds(found)[:-1]


def test_mesh_that_does_not_fit_is_a_way_out_by_itself() -> None:
    first, *_ = ways("gpt2-1.5b", "2x4xa100-40gb", mesh="4x2", recompute="full", budget="10GiB")
    assert (first.change, first.options.mesh) == ("without --mesh", None)


def test_another_system_may_recompute_and_be_ours() -> None:
    found = ways("llama-3.1-8b", "8xa100-40gb", like="torch-fsdp", micro_batch=1)
    assert found[0].change == "recompute activations"
    assert found[0].options.like == "torch-fsdp"
    assert (found[0].candidate.plan.recompute, found[0].candidate.plan.engine) == ("full", "torch")


def test_adapters_are_asked_for_by_their_options() -> None:
    """A smaller model stands for the adapted one."""
    asked = PlanOptions(model="gpt2-1.5b", cluster="1xl4", host_memory="0", budget="8GiB", micro_batch=1)

    def ask(options: PlanOptions) -> PlanQuestion:
        return question_of(replace(options, model="gpt2-124m", lora=None) if options.lora is not None else options)

    found = ways_out(replace(question_of(asked), ask=ask))
    adapted = found[kinds(found).index("LoRA")]
    assert adapted.options.command.endswith(f"--lora {LORA_RANK}")
    assert kinds(found).index("devices") < kinds(found).index("LoRA")


def test_what_cannot_fit_has_no_way_out() -> None:
    assert ways("params:900t", "1xl4") == []
