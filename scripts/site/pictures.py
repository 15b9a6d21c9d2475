"""The pictures of the guide, drawn from the same step program that the engine runs and `shardwise explain` prints.

    python scripts/site/pictures.py

writes docs/images/*.svg. Colours are classes, so that a picture follows the light or dark scheme of its page.
"""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from shardwise.measure.report.snapshots import Holding, Snapshot, StepSnapshots, snapshots_of
from shardwise.measure.report.text.ring_rounds import Round, first_cells, rounds
from shardwise.measure.report.text.step_picture import picture_model
from shardwise.plan import Plan
from shardwise.plan.placement import SHARDED, STRATEGIES
from shardwise.program import Kind, Trigger

FOLDER = Path(__file__).parents[2] / "docs" / "images"
NUM_RANKS = 4
WIDTH = 440
STYLE = """
.ink{fill:#263238}.faint{fill:#607d8b}.line{stroke:#90a4ae;fill:none}
.whole{fill:#3f51b5}.slice{fill:#00897b}.moving{fill:#fb8c00}.differs{fill:#d81b60}.nothing{fill:#eceff1}
.area{fill:#3f51b5;opacity:.25}.on{fill:#fff}
text{font:13px system-ui,sans-serif}.small{font-size:11px}.strong{font-weight:600}
@media(prefers-color-scheme:dark){.ink{fill:#eceff1}.faint{fill:#b0bec5}.nothing{fill:#37474f}.whole{fill:#7986cb}
.slice{fill:#4db6ac}.moving{fill:#ffb74d}.differs{fill:#f06292}.area{fill:#7986cb}.on{fill:#102027}}
"""
_CLASSES = {
    Holding.WHOLE: "whole",
    Holding.SLICE: "slice",
    Holding.ON_ITS_WAY: "moving",
    Holding.DIFFERS: "differs",
    Holding.NOTHING: "nothing",
}
_MEANINGS = {
    "whole": "whole",
    "slice": "own slice",
    "moving": "being sent",
    "differs": "differs between ranks",
    "nothing": "not here",
}
_PHASES = {Trigger.BEFORE_FORWARD: "forward", Trigger.BEFORE_BACKWARD: "backward", Trigger.AFTER_STEP: "update"}


def svg(parts: Iterable[str], *, height: float, title: str) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" viewBox="0 0 {WIDTH} {height:g}" role="img" '
        f'aria-label="{escape(title)}">\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n{body}\n</svg>\n'
    )


def text(x: float, y: float, words: str, *, style: str = "ink", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, *, style: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" class="{style}"/>'


def legend(y: float, *, styles: Iterable[str]) -> Iterator[str]:
    """Squares with their meaning, from left to right, in as many lines as it takes."""
    x = 0.0
    for style in styles:
        width = 28 + 6.0 * len(_MEANINGS[style])
        if x + width > WIDTH:
            x, y = 0.0, y + 18
        yield box(x, y - 10, 12, 12, style=style)
        yield text(x + 17, y, _MEANINGS[style], style="faint small")
        x += width


# What a rank holds, by strategy


def holds() -> str:
    """Rank 0 of 4 at the update: a cell is a quarter of the parameters in fp32, which are 4 bytes each."""
    states, per_byte = (("params", 4, 112), ("grads", 4, 178), ("optim", 8, 244)), 3.3
    parts = [text(x, 14, state, style="faint small") for state, _, x in states]
    parts.append(text(WIDTH, 14, "bytes / param", style="faint small", anchor="end"))
    for row, (name, placement) in enumerate(STRATEGIES.items()):
        y = 26 + 28 * row
        parts.append(text(0, y + 14, name, style="ink strong"))
        total = 0.0
        for state, size, x in states:
            is_sharded = getattr(placement, state) is SHARDED
            total += size / NUM_RANKS if is_sharded else size
            for cell in range(NUM_RANKS):
                style = ("slice" if cell == 0 else "nothing") if is_sharded else "whole"
                parts.append(box(x + (per_byte * size + 1) * cell, y, per_byte * size, 19, style=style))
        parts.append(text(WIDTH, y + 14, f"{total:g}", style="ink strong", anchor="end"))
    height = 26 + 28 * len(STRATEGIES) + 26
    parts += legend(height - 8, styles=("whole", "slice", "nothing"))
    return svg(parts, height=height, title="What rank 0 of 4 holds under each strategy when the optimizer runs")


# One step


def step(strategy: str) -> str:
    """What rank 0 of 4 holds after each operation: a column per operation, a row per unit; below, the bytes."""
    found = snapshots_of(picture_model(), plan=Plan(strategy=strategy), num_ranks=NUM_RANKS)
    shown = [one for one in found.snapshots if one.operation is None or one.operation.kind is not Kind.TAKE_GRADS]
    left, column = 80.0, (WIDTH - 80) / len(shown)
    parts = list(_phases(shown, left=left, column=column))
    y = 24.0
    for state in ("params", "grads"):
        for unit in shown[0].holds[state]:
            label = "root" if unit == "(root)" else unit.replace("blocks.", "block ")
            parts.append(text(0, y + 11, f"{state[:-1]}s, {label}" if unit == "(root)" else label, style="faint small"))
            parts += (
                box(left + column * at, y, column - 1, 13, style=_CLASSES[one.holds[state][unit]])
                for at, one in enumerate(shown)
            )
            y += 16
        y += 8
    parts += _bytes(found, shown, left=left, column=column, top=y + 18)
    height = y + 164
    parts += legend(height - 24, styles=("whole", "slice", "moving", "differs", "nothing"))
    return svg(
        parts, height=height, title=f"One step of {strategy} on rank 0 of 4: what it holds of each unit, and bytes"
    )


def _phases(shown: list[Snapshot], *, left: float, column: float) -> Iterator[str]:
    last = ""
    for at, one in enumerate(shown):
        phase = _PHASES.get(one.row.trigger, last) if one.row is not None else last
        if phase != last:
            x = left + column * at
            yield f'<path d="M{x - 0.5:.1f} 0V260" class="line" stroke-dasharray="2 3"/>'
            # The update is short, and at the right edge.
            near_edge = x > WIDTH - 60
            yield text(
                x - 4 if near_edge else x + 4, 14, phase, style="ink strong", anchor="end" if near_edge else "start"
            )
            last = phase


def _bytes(found: StepSnapshots, shown: list[Snapshot], *, left: float, column: float, top: float) -> Iterator[str]:
    tall, most = 84.0, found.peak.held_bytes
    heights = [tall * one.held_bytes / most for one in shown]
    points = [f"M{left:.1f} {top + tall:.1f}"]
    for at, height in enumerate(heights):
        points += [f"L{left + column * at:.1f} {top + tall - height:.1f}", f"h{column - 1:.1f}"]
    yield f'<path d="{"".join(points)}V{top + tall:.1f}Z" class="area"/>'
    at = shown.index(found.peak)
    yield text(0, top + 12, "MiB", style="faint small")
    yield text(
        left + column * at + column / 2, top - 4, f"{most / 2**20:.0f} at the peak", style="ink small", anchor="middle"
    )
    first = shown[0].held_bytes
    yield text(left + 2, top + tall - heights[0] - 4, f"{first / 2**20:.0f}", style="ink small")
    yield text(
        WIDTH, top + tall - heights[-1] - 4, f"{shown[-1].held_bytes / 2**20:.0f}", style="ink small", anchor="end"
    )


# The ring


def ring() -> str:
    """Four ranks (rows) and four chunks (columns), round by round; the number in a cell: how many ranks it sums."""
    played = list(rounds(NUM_RANKS))
    parts, wide, tall = [], WIDTH / NUM_RANKS, 148.0
    for row, part in enumerate(("reduce-scatter", "all-gather")):
        chosen = [one for one in played if one.part == part]
        parts.append(
            text(2, row * tall + 14, f"{part}: what arrives is {('added', 'copied')[row]}", style="ink strong")
        )
        for column, one in enumerate(chosen, start=1):
            title = f"round {one.number}"
            parts += _panel(one.cells, x=column * wide + 2, y=row * tall + 20, title=title, arrived=one)
    parts += _panel(first_cells(NUM_RANKS), x=2, y=20, title="start", arrived=None)
    notes = ("row: a rank", "column: a chunk", "number: how many", "ranks are in the sum")
    parts += (text(2, tall + 50 + 16 * at, note, style="faint small") for at, note in enumerate(notes))
    height = 2 * tall + 10
    for x, style, words in ((0, "moving", "just arrived"), (110, "whole", "sum of all 4 ranks")):
        parts += [box(x, height - 14, 12, 12, style=style), text(x + 17, height - 4, words, style="faint small")]
    return svg(parts, height=height, title="A ring all-reduce on 4 ranks: reduce-scatter, then all-gather")


def _panel(
    cells: Sequence[Sequence[Sequence[int]]], *, x: float, y: float, title: str, arrived: Round | None
) -> Iterator[str]:
    yield text(x, y + 14, title, style="faint small")
    for rank, chunks in enumerate(cells):
        for chunk, summands in enumerate(chunks):
            is_new = arrived is not None and arrived.received(rank) == chunk
            style = "moving" if is_new else "whole" if len(summands) == NUM_RANKS else "nothing"
            yield box(x + 25 * chunk, y + 20 + 22 * rank, 23, 20, style=style)
            ink = "ink" if style == "nothing" else "on"
            yield text(
                x + 25 * chunk + 11.5, y + 34 + 22 * rank, str(len(summands)), style=f"{ink} small", anchor="middle"
            )


PICTURES = {
    "strategies.svg": holds,
    "step-ddp.svg": lambda: step("ddp"),
    "step-fsdp.svg": lambda: step("fsdp"),
    "ring.svg": ring,
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw())
        print(FOLDER / name)


if __name__ == "__main__":
    main()
