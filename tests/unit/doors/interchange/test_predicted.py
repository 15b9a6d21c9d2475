"""What the planner finds in a setup."""

import pytest

from shardwise.doors.interchange.foreign_setup import ForeignSetup
from shardwise.doors.interchange.predicted import predict
from shardwise.hardware.cluster import parse_cluster
from shardwise.models.reference import Model
from shardwise.plan import Plan


def codes(model: str, cluster: str, **settings: object) -> list[str]:
    plan = Plan(precision="bf16", engine="torch", capture="off", **settings)  # type: ignore[arg-type]
    setup = ForeignSetup(tool="accelerate", plan=plan, settings={})
    _, findings = predict(setup, Model(model).spec_for, cluster=parse_cluster(cluster), micro_batch=None)
    return [finding.code for finding in findings]


def test_a_batch_that_cannot_fit_is_named_with_one_that_does() -> None:
    setup = ForeignSetup(tool="accelerate", plan=Plan(precision="bf16", engine="torch", micro_batch=64), settings={})
    spec_for = Model("llama-3.1-8b").spec_for
    _, (finding,) = predict(setup, spec_for, cluster=parse_cluster("8xh100-80gb"), micro_batch=None)
    assert finding.code == "SW104"
    assert "64 samples per rank need" in finding.line


def test_sharding_what_fits_as_replicas_is_named() -> None:
    assert "SW105" in codes("gpt2-124m", "8xh100-80gb", micro_batch=8)
    assert "SW105" not in codes("gpt2-124m", "8xh100-80gb", micro_batch=8, strategy="ddp")


def test_a_small_batch_that_the_host_bounds_is_named() -> None:
    assert "SW109" in codes("gpt2-124m", "8xh100-80gb", micro_batch=1, strategy="ddp")
    assert "SW109" not in codes("llama-3.1-8b", "64xh100-80gb", micro_batch=1)


@pytest.mark.parametrize(("model", "expected"), [("gpt2-124m", True), ("llama-3.1-70b", False)])
def test_offload_of_what_fits_is_named(model: str, expected: bool) -> None:
    plan = Plan(precision="bf16", micro_batch=1, offload_states=True, recompute="full", capture="off")
    setup = ForeignSetup(tool="deepspeed", plan=plan, settings={}, foreign="deepspeed")
    cluster = parse_cluster("8xh100-80gb")
    found, findings = predict(setup, Model(model).spec_for, cluster=cluster, micro_batch=None)
    assert ("SW111" in [finding.code for finding in findings]) is expected, (found.fits, findings)
