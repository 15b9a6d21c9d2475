"""What guides say of DDP and FSDP, checked: writes docs/claims.md.

    python benchmarks/claims.py
    python benchmarks/claims.py --only 60B,ViT    prints some claims, and writes nothing

Numbers come from the planner, from two Gloo ranks that are started here, and from results that were measured before
(benchmarks/results). Every verdict follows from its numbers. A test makes the page again and compares.
"""

import sys
from collections.abc import Iterator
from functools import partial

from claim_rows import memory_claims, speed_claims, step_claims, vit_claims
from claim_rows.claim import Claim
from rows import ROOT, Row, arguments, chosen, table
from workers import on_ranks

PAGE = ROOT / "docs" / "claims.md"
_INTRODUCTION = """# Claims, checked

What guides say about DDP and FSDP, each with our number and a verdict that is computed from it.
*Predicted* numbers come from [the planner](planner.md), *measured* ones from a run that is named with them.
One command generates this page, and a test checks that it is up to date:

<!-- not run: tests/dist/test_claims.py makes the same page -->
```bash
python benchmarks/claims.py
```
"""


def rows(run_ranks: step_claims.RunRanks) -> list[Row]:
    """Return the claims in the order of the page. `run_ranks`: what runs a function on ranks."""
    ranks = run_ranks(step_claims.step_body, num_ranks=2)
    claims = {
        "100M": memory_claims.hundred_million,
        "2B": memory_claims.two_billion,
        "60B": memory_claims.sixty_billion,
        "a few hundred MB": memory_claims.few_hundred_megabytes,
        "4 times larger": speed_claims.four_times_larger,
        "best below": speed_claims.best_below,
        "collectives": partial(step_claims.collectives, ranks[0]["collectives"]),
        "SHARD_GRAD_OP": speed_claims.between_the_two,
        "BasicBlock": memory_claims.basic_blocks,
        "sampler": step_claims.same_batches,
        "inside backward": partial(step_claims.inside_backward, [rank["averaged"] for rank in ranks]),
        "linear in ranks": memory_claims.linear_in_ranks,
        "larger batch": speed_claims.larger_batch,
        "the gap": speed_claims.narrowing_gap,
        "ViT-Large": vit_claims.vit_large,
    }
    return [Row(name=name, run=run) for name, run in claims.items()]


def page(found: list[Claim]) -> str:
    numbered = list(enumerate(found, start=1))
    lines = [(f"[{number}.](#claim-{number}) {claim.said}", claim.number, claim.verdict) for number, claim in numbered]
    sections = [line for number, claim in numbered for line in section(number, claim)]
    return "\n".join([_INTRODUCTION, table(("claim", "our number", "verdict"), lines), "", *sections]) + "\n"


def section(number: int, claim: Claim) -> Iterator[str]:
    yield from (f"## Claim {number}", "", f"> {claim.said}", "")
    yield from (f"**Our number:** {claim.number}.", "")
    yield from (f"**Verdict: {claim.verdict}.**", "")
    if claim.failed and claim.verdict != "does not hold":
        yield from (f"It does not hold when {', and when '.join(claim.failed)}.", "")
    yield from (table(claim.head, claim.rows, right=True), "", claim.source, "")
    if claim.comment:
        yield from (claim.comment, "")


def main() -> None:
    asked = arguments(__doc__).parse_args()
    if asked.only:
        for number, row in enumerate(chosen(rows(on_ranks), only=asked.only), start=1):
            print("\n".join(section(number, row.run())))
        return
    PAGE.write_text(page([row.run() for row in rows(on_ranks)]))
    print(f"wrote {PAGE}", file=sys.stderr)


if __name__ == "__main__":
    main()
