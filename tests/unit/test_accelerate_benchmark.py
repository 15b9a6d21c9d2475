"""benchmarks/accelerate_vit.py: its account of bytes, and that no process outlives a failure or its time."""

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shardwise.models.catalogue import shape_of

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "accelerate_vit.py"
PARAMS = 4 * 304_326_632  # ViT-Large in float32

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("accelerate_vit", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["accelerate_vit"] = module
    paths = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = paths
    return module


def rank_of(*, peak_bytes: int) -> dict[str, Any]:
    return {
        "allocated_bytes": {"after_prepare": 2 * PARAMS + 5},
        "peak_by_phase_bytes": {"forward": peak_bytes - 1, "backward": peak_bytes, "step": 7 * PARAMS},
        "peak_allocated_bytes": peak_bytes,
        "peak_reserved_bytes": peak_bytes + 1,
    }


def done(script: ModuleType, name: str, *, peak_bytes: int, error: str | None = None) -> dict[str, Any]:
    (case,) = (case for case in script.CASES if case.name == name)
    rank = rank_of(peak_bytes=peak_bytes)
    return {
        "name": name,
        "batch_size": 32,
        "error": error,
        "ranks": [rank],
        "samples_per_s": 100.0,
        "losses": [7.0, 6.9],
        "account": script.account(case, shape=shape_of("vit-large"), batch_size=32, rank=rank),
    }


def test_a_rank_of_two_holds_half_of_what_its_case_shards(script: ModuleType) -> None:
    shape = shape_of("vit-large")
    ddp, full, grad_op, fsdp2 = (script.items_bytes(case, shape=shape) for case in script.CASES)
    assert (ddp["params"], ddp["grads"], ddp["optim"]) == (PARAMS, PARAMS, 2 * PARAMS)
    assert (ddp["ddp_buckets"], ddp["optimizer_temporaries"]) == (PARAMS, PARAMS)
    for sharded in (full, grad_op, fsdp2):
        assert (sharded["params"], sharded["grads"], sharded["optim"]) == (PARAMS // 2, PARAMS // 2, PARAMS)
        assert (sharded["ddp_buckets"], sharded["optimizer_temporaries"]) == (0, PARAMS // 2)
        assert sharded["autocast_copies"] == ddp["gathered"] == 0
    assert grad_op["gathered"] == PARAMS // 2
    assert full["gathered"] == fsdp2["gathered"] < ddp["autocast_copies"] < PARAMS // 2


def test_the_account_leaves_what_no_formula_explains_as_rest(script: ModuleType) -> None:
    points = done(script, "ddp", peak_bytes=10 * PARAMS)["account"]["points"]
    assert set(points) == {"after_prepare", "peak_of_backward", "peak_of_step"}
    assert points["after_prepare"]["rest_bytes"] == 5
    assert points["peak_of_step"]["formula_bytes"] == 6 * PARAMS
    assert points["peak_of_step"]["rest_bytes"] == PARAMS


def test_a_saving_is_the_sum_of_its_items_and_the_rest(script: ModuleType) -> None:
    cases = [
        done(script, "ddp", peak_bytes=10 * PARAMS),
        done(script, "fsdp_full_shard", peak_bytes=6 * PARAMS),
        done(script, "fsdp2", peak_bytes=5 * PARAMS, error="no"),
    ]
    (row,) = script.savings(cases)
    assert (row["name"], row["saving_fraction"]) == ("fsdp_full_shard", pytest.approx(0.4))
    assert row["saving_bytes"] == 4 * PARAMS == sum(row["by_item_bytes"].values()) + row["rest_bytes"]


def test_the_published_saving_is_accounted_for_in_full(script: ModuleType) -> None:
    published = script.published_account()
    assert published["saving_gb"] == pytest.approx(published["all_items_gb"] + published["not_explained_gb"])


def test_the_table_shows_savings_and_failures(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [
        done(script, "ddp", peak_bytes=10_000_000_000),
        done(script, "fsdp_full_shard", peak_bytes=6_000_000_000),
        done(script, "fsdp2", peak_bytes=1, error="exit codes [1, 1]: …"),
    ]
    script.print_table(cases, shared_gpu=True)
    shown = capsys.readouterr().out
    assert "6.00" in shown
    assert "40%" in shown
    assert "failed: exit codes [1, 1]" in shown
    assert "not a speed result" in shown


def test_when_one_process_fails_the_others_are_ended(script: ModuleType) -> None:
    waits = ([sys.executable, "-c", "import time; time.sleep(50)"], {})
    fails = ([sys.executable, "-c", "print('the reason'); raise SystemExit(3)"], {})
    start = time.monotonic()
    error = script.run([waits, fails], limit_s=40)
    assert "3" in error
    assert "the reason" in error
    assert time.monotonic() - start < 30


def test_a_case_ends_with_its_time(script: ModuleType) -> None:
    waits = ([sys.executable, "-c", "import time; time.sleep(50)"], {})
    assert script.run([waits, waits], limit_s=1).startswith("not done after 1 s")
    assert script.run([([sys.executable, "-c", ""], {})], limit_s=40) is None
