"""The host probe: what it measures, where it is kept, and that predictions follow it."""

import json
import multiprocessing
import os
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from shardwise.base.errors import InvalidCluster, InvalidData
from shardwise.doors.cli.app import main
from shardwise.hardware import Cluster, Device, cluster_of, device_of
from shardwise.hardware import host_here as here
from shardwise.hardware.borrowed import host_factor, kernel_model_of
from shardwise.hardware.calibration import (
    Calibration,
    HostSpeed,
    engine_factor,
    read_host_speed,
    reference_host,
    shipped_calibration,
)
from shardwise.hardware.measuring.probe_host import probe_host, seconds_on_core
from shardwise.models.reference import Model
from shardwise.plan import Plan
from shardwise.planner.time.step_time import TimeEstimate, estimate_time


def slower(times: float, *, share: float = 1.0) -> HostSpeed:
    """The reference host, so many times as slow."""
    host = reference_host()
    return replace(
        host,
        call_seconds=times * host.call_seconds,
        hook_seconds=times * host.hook_seconds,
        dispatch_seconds={
            kind: {way: times * seconds for way, seconds in ways.items()}
            for kind, ways in host.dispatch_seconds.items()
        },
        share=share,
    )


def step(host: HostSpeed | None, *, cluster: str = "1xh200", batch: int = 1) -> TimeEstimate:
    """Of GPT-124M, which at one sample is bound by the CPU."""
    where = cluster_of(cluster)
    plan = Plan(strategy="fsdp", precision="bf16", micro_batch=batch)
    spec = Model("gpt2-124m").spec_for(plan)
    found = estimate_time(spec, plan=plan, cluster=replace(where, device=replace(where.device, host=host)))
    assert found is not None
    return found


def test_the_reference_host_predicts_what_is_predicted_without_a_probe() -> None:
    assert step(reference_host()).step_seconds == pytest.approx(step(None).step_seconds, rel=2e-3)


@pytest.mark.parametrize("cluster", ["1xh200", "8xa100-80gb"])
def test_a_step_that_the_cpu_bounds_goes_with_the_host(cluster: str) -> None:
    once, twice = step(slower(1.0), cluster=cluster), step(slower(2.0), cluster=cluster)
    assert twice.cpu_seconds == pytest.approx(2 * once.cpu_seconds, rel=1e-6)
    assert once.step_seconds == once.cpu_seconds
    assert twice.step_seconds == twice.cpu_seconds


def test_a_step_that_the_device_bounds_does_not_go_with_the_host() -> None:
    assert step(slower(0.5), batch=64).step_seconds == pytest.approx(step(slower(1.0), batch=64).step_seconds)


def test_a_core_that_is_shared_counts_as_a_slower_host() -> None:
    assert step(slower(1.0, share=2.0)).cpu_seconds == pytest.approx(step(slower(2.0)).cpu_seconds)


def on_a_cpu(*, ranks_per_core: float = 1.0) -> Device:
    """A CPU whose calibration says half a second of an H200's numbers; what matters is how they change."""
    shipped = shipped_calibration("h200")
    assert shipped is not None
    calibration: Calibration = replace(shipped, ranks_per_core=ranks_per_core)
    peaks = device_of("h200")
    return replace(
        device_of("cpu"),
        memory_bytes_per_s=peaks.memory_bytes_per_s,
        fp32_flops_per_s=peaks.fp32_flops_per_s,
        calibration=calibration,
    )


def test_where_the_cpu_computes_its_kernels_go_with_the_host_too() -> None:
    device = on_a_cpu()
    once, twice = (kernel_model_of(replace(device, host=slower(times))).calibration for times in (1.0, 2.0))
    assert twice.kernel_seconds == pytest.approx(2 * once.kernel_seconds)
    assert twice.reach["add"] == pytest.approx(once.reach["add"] / 2)
    assert twice.launch_seconds["other"][1] == pytest.approx(2 * once.launch_seconds["other"][1])


def test_ranks_that_share_a_core_slow_each_other_down_on_a_probed_host_too() -> None:
    alone, together = on_a_cpu(), on_a_cpu(ranks_per_core=2.0)
    factors = [host_factor(replace(device, host=slower(1.0))) for device in (alone, together)]
    assert factors[1] == pytest.approx(2 * factors[0])


def test_an_engine_goes_with_python_and_with_dispatch() -> None:
    quick_python = replace(slower(1.0), call_seconds=reference_host().call_seconds / 8)
    assert engine_factor(quick_python, reference=reference_host()) == pytest.approx(0.5)


def test_the_probe_of_this_host_can_be_read_again() -> None:
    found = probe_host(torch.device("cpu"), seconds=0.2)
    assert found.share >= 1.0
    assert 0 < found.call_seconds < found.hook_seconds
    assert read_host_speed(json.loads(json.dumps(found.to_data())), where="here") == found


def _pinned(core: int, connection: Connection | None) -> None:
    """The share of the core that this process gets, through the connection; without one, be busy for ever."""
    os.sched_setaffinity(0, {core})
    while connection is None:
        pass
    passed, used = seconds_on_core(0.5)
    connection.send(passed / used)


def test_the_probe_sees_that_others_use_its_core() -> None:
    core, context = min(os.sched_getaffinity(0)), multiprocessing.get_context("fork")
    here, there = context.Pipe()
    other = context.Process(target=_pinned, args=(core, None), daemon=True)
    probe = context.Process(target=_pinned, args=(core, there))
    other.start()
    probe.start()
    try:
        assert here.poll(60)
        # Half of the core at most; less where this machine has still more to do.
        assert here.recv() > 1.5
    finally:
        other.kill()
        other.join()
        probe.join()


@pytest.mark.parametrize("data", [{}, [], {"source": "x"}, {**reference_host().to_data(), "share": 0.5}])
def test_what_is_no_speed_of_a_host_is_one_line(data: object) -> None:
    with pytest.raises(InvalidData, match="is no speed of a host"):
        read_host_speed(data, where="it")


# The cache


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The kinds of device that were probed for, each without measuring anything."""
    made: list[str] = []

    def probed(kind: str) -> HostSpeed:
        made.append(kind)
        return slower(float(len(made)))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SHARDWISE_CACHE", raising=False)
    monkeypatch.setattr(here, "_probed", probed)
    return made


def test_a_host_is_probed_once_a_day(probes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert here.host_here("cpu") == here.host_here("cpu") == slower(1.0)
    assert probes == ["cpu"]
    here.host_here("cuda")
    assert probes == ["cpu", "cuda"]
    tomorrow = time.time() + 25 * 3600
    monkeypatch.setattr(here.time, "time", lambda: tomorrow)
    assert here.host_here("cpu") == slower(3.0)


def test_a_broken_file_is_measured_again_and_written_again(probes: list[str], tmp_path: Path) -> None:
    here.host_here("cpu")
    (path,) = tmp_path.rglob("*.json")
    for broken in ("", "{", "[]", '{"when": 1}', '{"when": "x", "host": {}}'):
        path.write_text(broken)
        here.host_here("cpu")
    assert len(probes) == 6
    here.host_here("cpu")
    assert len(probes) == 6


def test_nothing_is_kept_where_the_user_wants_nothing(
    probes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", "off")
    here.host_here("cpu")
    here.host_here("cpu")
    assert len(probes) == 2
    assert not list(tmp_path.rglob("*"))


# The command


def said(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["plan", "gpt2-124m", "--strategy", "ddp", "--micro-batch", "1", *arguments])
    assert not caught.value.code
    return capfd.readouterr().out


def test_plan_says_whether_the_host_is_assumed_or_was_probed(
    probes: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert "The speed of the host CPU is assumed" in said(capfd, "--cluster", "1xh200")
    assert "assumed" not in said(capfd, "--cluster", "1xh200", "--here")
    assert json.loads(said(capfd, "--cluster", "1xh200", "--json"))["host"] == "assumed"
    assert json.loads(said(capfd, "--cluster", "1xh200", "--here", "--json"))["host"] == "probed"
    assert probes == ["cuda"]


def test_a_gpu_that_is_not_here_cannot_be_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    monkeypatch.setenv("SHARDWISE_CACHE", "off")
    with pytest.raises(InvalidCluster, match="this host cannot be probed: .*torch finds no GPU here"):
        here.probed_cluster(Cluster(devices_per_node=1, device=device_of("h200")))
