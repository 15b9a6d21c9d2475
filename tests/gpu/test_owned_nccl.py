"""On two NCCL ranks that share a GPU: OWNED matrices, `replan` and a quantised base give the bits of one process.

Two numbers have the same sum in any order, and the kernels are those that give the same bits each time.
"""

import json

import pytest
from sharing_ranks import run_script

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
NUM_RANKS = 2


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Of each rank: name of a case → what is wrong in it."""
    folder = tmp_path_factory.mktemp("owned")
    run_script("owned_rank.py", num_ranks=NUM_RANKS, folder=folder)
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
def test_muon_gives_the_bits_of_one_process(found: list[dict[str, str]], strategy: str) -> None:
    assert [rank[f"muon {strategy}"] for rank in found] == ["", ""]


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
def test_scaled_gradients_in_fp16_do_too_and_an_overflow_is_skipped_by_all(
    found: list[dict[str, str]], strategy: str
) -> None:
    assert [rank[f"scaled muon {strategy}"] for rank in found] == ["", ""]


def test_another_plan_between_two_steps_gives_the_bits_of_one_process(found: list[dict[str, str]]) -> None:
    assert [rank["replan"] for rank in found] == ["", ""]


def test_adapters_on_an_nf4_base_give_the_bits_of_one_process(found: list[dict[str, str]]) -> None:
    pytest.importorskip("bitsandbytes")
    assert [rank["quantised"] for rank in found] == ["", ""]
