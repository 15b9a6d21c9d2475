"""The losses of trainings in bf16 and in fp8 as a picture.

    python scripts/site/fp8_picture.py

writes docs/images/fp8-losses.svg, from benchmarks/results/fp8_numerics_h200.json.
"""

import json
from pathlib import Path

from line_chart import HEIGHT, Chart, legend
from pictures import FOLDER, svg

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "fp8_numerics_h200.json"
COLOURS = {"bf16": "#78909c", "tensorwise": "#5c6bc0", "rowwise": "#fb8c00"}


def picture() -> str:
    rows = json.loads(RESULTS.read_text())["rows"]
    steps = rows[0]["steps"]
    # The first losses, of a model that knows nothing, would leave no room for the differences.
    shown = [row["curve"][2:] for row in rows]
    chart = Chart(most=steps, low=0.97 * min(map(min, shown)), high=1.02 * max(map(max, shown)))
    parts = list(chart.axes(upwards="loss", across="steps", every=100, remark="three seeds each; from step 40 on"))
    for row in rows:
        distance = steps / len(row["curve"])
        line = [(distance * number, loss) for number, loss in enumerate(row["curve"], start=1)][2:]
        parts += chart.line(line, colour=COLOURS[row["way"]])
    parts += legend(COLOURS)
    return svg(parts, height=HEIGHT, title="Losses of three seeds in bf16 and in fp8, tensorwise and rowwise")


def main() -> None:
    path = FOLDER / "fp8-losses.svg"
    path.write_text(picture())
    print(path)


if __name__ == "__main__":
    main()
