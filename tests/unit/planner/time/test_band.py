"""The band of a prediction follows from what is known of the case."""

from dataclasses import replace

import pytest

from shardwise.hardware import cluster_of
from shardwise.hardware.calibration import shipped_calibration
from shardwise.hardware.device import software_of
from shardwise.plan import Plan
from shardwise.planner.systems import system_of
from shardwise.planner.time.band import TimeBand, time_band

PLAN = Plan()


def band(cluster: str, *, plan: Plan = PLAN, host_share: float = 0.1, system: str = "") -> float:
    return time_band(plan=plan, cluster=cluster_of(cluster), host_share=host_share, system=system_of(system)).value


def test_the_less_is_known_of_a_device_the_wider_the_band() -> None:
    kinds = ("h200", "h100", "a100", "rtx-3090", "b200")
    calibrated, same, other, new, unseen = (band(f"8x{kind}") for kind in kinds)
    assert calibrated < same < other < new < unseen


def test_a_calibrated_device_with_other_kernels_is_not_calibrated() -> None:
    cluster = cluster_of("8xh200")
    old = replace(cluster, device=replace(cluster.device, software=software_of("2023")))
    assert time_band(plan=PLAN, cluster=old, host_share=0.1).value == band("8xh100")


@pytest.mark.parametrize(
    "options",
    [
        {"cluster": "2x8xa100"},
        {"cluster": "8xa100", "plan": replace(PLAN, compile="inductor")},
        {"cluster": "8xa100", "host_share": 0.95},
        {"cluster": "8xa100", "system": "deepspeed"},
    ],
)
def test_whatever_is_less_sure_widens_it(options: dict[str, object]) -> None:
    assert band(**options) > band("8xa100")  # type: ignore[arg-type]


def test_a_host_that_was_calibrated_is_surer_than_one_that_was_not() -> None:
    cluster = cluster_of("8xh200")
    own = replace(cluster, device=replace(cluster.device, calibration=shipped_calibration("h200")))
    bands = [time_band(plan=PLAN, cluster=one, host_share=1.0).value for one in (own, cluster)]
    assert bands[0] < 0.12 < bands[1]


def test_a_device_of_ones_own_is_calibrated_whatever_it_is() -> None:
    cluster = cluster_of("8xmi300x")
    own = replace(cluster, device=replace(cluster.device, calibration=shipped_calibration("h200")))
    assert time_band(plan=PLAN, cluster=own, host_share=0.1).value == band("8xh200")


def test_parts_add_up_as_independent_ones_do() -> None:
    far, nodes = "extrapolated from an H200, another architecture", "across nodes"
    both = TimeBand((far, nodes)).value
    assert both**2 == pytest.approx(TimeBand((far,)).value ** 2 + TimeBand((nodes,)).value ** 2)


def test_the_band_says_what_it_follows_from() -> None:
    found = time_band(plan=PLAN, cluster=cluster_of("2x8xa100"), host_share=0.1)
    assert str(found).startswith("± 14% (extrapolated from an H200, another architecture, across nodes)")
