"""What guides say of DDP and FSDP, checked: writes docs/claims.md.

    python benchmarks/claims.py

Numbers come from the planner, from two Gloo ranks that are started here, and from results that were measured before
(benchmarks/results). Every verdict follows from its numbers. A test makes the page again and compares.
"""

import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch.distributed as dist
from claim_rows import memory_claims, speed_claims, step_claims, vit_claims
from claim_rows.claim import Claim

PAGE = Path(__file__).parents[1] / "docs" / "claims.md"
LIMIT_SECONDS = 120.0
# The order of the page.
_ORDER = (
    "100M parameters",
    "A model with 2B",
    "A model with 60B",
    "A model that needs a few hundred MB",
    "FSDP trains models 4×",
    "DDP is best",
    "DDP does one all-reduce",
    "SHARD_GRAD_OP",
    "Wrapping each BasicBlock",
    "Without a distributed sampler",
    "The all-reduce happens",
    "Under FSDP, memory",
    "For large models",
    "The gap",
    "ViT-Large",
)


def claims(run_ranks: step_claims.RunRanks) -> list[Claim]:
    found = [*memory_claims.rows(), *speed_claims.rows(), *vit_claims.rows(), *step_claims.rows(run_ranks)]
    by_words = {words: claim for words in _ORDER for claim in found if claim.said.startswith(words)}
    assert len(by_words) == len(_ORDER) == len(found)
    return list(by_words.values())


def page(found: list[Claim]) -> str:
    return "\n".join(_lines(found)) + "\n"


def _lines(found: list[Claim]) -> Iterator[str]:
    yield "# Claims, checked"
    yield ""
    yield "What guides say about DDP and FSDP, each with our number and a verdict that is computed from it."
    yield "*Predicted* numbers come from [the planner](planner.md), *measured* ones from a run that is named with them."
    yield "One command generates this page, and a test checks that it is up to date:"
    yield from ("", "<!-- not run: tests/dist/test_claims.py makes the same page -->", "```bash")
    yield from ("python benchmarks/claims.py", "```", "")
    yield from ("| claim | our number | verdict |", "|---|---|---|")
    for number, claim in enumerate(found, start=1):
        yield f"| [{number}.](#claim-{number}) {claim.said} | {claim.number} | {claim.verdict} |"
    yield ""
    for number, claim in enumerate(found, start=1):
        yield from _section(number, claim)


def _section(number: int, claim: Claim) -> Iterator[str]:
    yield from (f"## Claim {number}", "", f"> {claim.said}", "")
    yield from (f"**Our number:** {claim.number}.", "")
    yield from (f"**Verdict: {claim.verdict}.**", "")
    if claim.failed and claim.verdict != "does not hold":
        yield from (f"It does not hold when {', and when '.join(claim.failed)}.", "")
    yield from (*claim.table.lines(), "", claim.source, "")
    if claim.comment:
        yield from (claim.comment, "")


# Two ranks


def run_ranks(body: Callable[[int], Any], *, num_ranks: int) -> list[Any]:
    """What `body(rank)` returns on each of so many fresh processes that have joined one Gloo group."""
    context = multiprocessing.get_context("spawn")
    results: Queue[tuple[int, Any]] = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(body, rank, num_ranks, folder, results), daemon=True)
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        found = dict(results.get(timeout=LIMIT_SECONDS) for _ in ranks)
        for process in ranks:
            process.join(LIMIT_SECONDS)
    return [found[rank] for rank in range(num_ranks)]


def _rank(
    body: Callable[[int], Any], rank: int, num_ranks: int, folder: str, results: "Queue[tuple[int, Any]]"
) -> None:
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    results.put((rank, body(rank)))
    dist.destroy_process_group()


def main() -> None:
    PAGE.write_text(page(claims(run_ranks)))
    print(f"wrote {PAGE}", file=sys.stderr)


if __name__ == "__main__":
    main()
