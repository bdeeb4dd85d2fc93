"""docs/simulator.md says what the program does: its recipes, options and figures."""

import re
from pathlib import Path

import pytest
from msgspec.structs import fields

from pointsman.simulate.profile import EngineProfile
from pointsman.simulate.sizes import Size
from pointsman.simulate.sources import profile_names
from pointsman.simulate.synthetic import RECIPES, Recipe

PAGE = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()


def table(*first: str) -> list[list[str]]:
    """Return the lines of the table with these first columns."""
    lines = PAGE.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("| " + " | ".join(first)))
    found = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return [found[0], *found[2:]]


def shown(value: object) -> str:
    text = str(value) if isinstance(value, Size) else f"{value:g}"
    return text.removeprefix("constant/") if not isinstance(value, int) else str(value)


@pytest.mark.parametrize("name", RECIPES)
def test_the_table_of_workloads_has_their_numbers(name: str) -> None:
    header, *lines = table("key", "meaning")
    column = header.index(f"`{name}`")
    keys = set()
    for line in lines:
        named = re.findall(r"`(\w+)`", line[0])
        keys |= set(named)
        values = ", ".join(shown(getattr(RECIPES[name], key)) for key in named)
        assert line[column] in (values, "-"), (name, named)
    assert keys == {field.name for field in fields(Recipe)}
    assert len(header) == 2 + len(RECIPES)


def test_the_table_of_engines_has_the_defaults() -> None:
    lines = table("key", "default")[1:]
    pairs = [
        (key, value.strip())
        for line in lines
        for key, value in zip(re.findall(r"`(\w+)`", line[0]), line[1].split(","), strict=True)
    ]
    assert dict(pairs) == {
        field.name: value if isinstance(value := field.default, str) else f"{value:.12g}"
        for field in fields(EngineProfile)
    }


def test_the_profiles_that_come_with_the_package_are_listed() -> None:
    names = [
        name for line in table("name", "engine")[1:] for name in re.findall(r"`(\S+)`", line[0])
    ]
    assert sorted(names) == profile_names()
