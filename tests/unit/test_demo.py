"""`make demo` opens with an answer about a real model, at a price that the price list has, and then benches."""

import re
from pathlib import Path

import pytest

from shardwise.doors.cli.app import main
from shardwise.hardware.prices import prices

MAKEFILE = (Path(__file__).parents[2] / "Makefile").read_text()


def test_the_first_command_of_the_demo_recommends_a_plan_and_says_what_it_costs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (price,) = re.findall(r"^DEMO_PRICE \?= (.*)$", MAKEFILE, flags=re.MULTILINE)
    assert float(price) == prices(())["h100-80gb"].per_gpu_hour
    recipe = MAKEFILE.partition("\ndemo:")[2].partition("\n\n")[0]
    first, *others = re.findall(r"\$\(BIN\)/shardwise ((?:plan|bench|report) .*)", recipe)
    with pytest.raises(SystemExit) as end:
        main(first.replace("$(DEMO_PRICE)", price).split())
    assert not end.value.code
    said = capsys.readouterr().out
    assert "Recommended: " in said
    assert "cost" in said
    assert [command.split()[0] for command in others] == ["bench", "report"]
