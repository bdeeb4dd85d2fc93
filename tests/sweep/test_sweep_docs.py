"""The pages about sweeping: no option is left out, no picture is missing, and the table is a curve."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
import typer

from pointsman.cli_cascade import cascade_app

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "cascades.md").read_text()
COMMANDS = typer.main.get_group(cascade_app).commands


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained(command: str) -> None:
    assert f"pointsman cascade {command}" in PAGE
    options = {option for each in COMMANDS[command].params for option in each.opts}
    named = set(re.findall(r"--[a-z-]+", PAGE))
    assert {option for option in options if option.startswith("--")} <= named


def test_every_picture_is_there() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", PAGE)
    assert len(pictures) >= 2
    assert all((DOCS / picture).exists() for picture in pictures)


def test_the_table_of_the_real_sweep_is_monotone_in_cost() -> None:
    table = PAGE.partition("| mean_logprob | escalated |")[2].partition("\n\n")[0]
    rows = [line.split("|") for line in table.splitlines()[2:]]
    points = [(float(row[2].rstrip(" %")), float(row[3])) for row in rows]
    assert len(points) == 12
    assert all(low < high for low, high in pairwise(points))
    assert [cost for _, cost in points] == sorted(cost for _, cost in points)
