"""The page about engines: its table has every dialect and connector, and every test that it names is there."""

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from pointsman.config import load
from pointsman.dialect.engines import DIALECTS, SERVES
from pointsman.flow.connectors import CONNECTORS

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
PAGE = (DOCS / "engines.md").read_text()
README = (DOCS.parent / "README.md").read_text()
EXAMPLES = re.findall(r"```toml\n(.*?)```", PAGE + README, re.DOTALL)
CAPABILITIES = (
    *("Discovery", "Readiness", "Load", "Tokenize", "Hand-off", "LoRA", "Abort", "Cached tokens"),
    *("KV events", "APIs"),
)
LINK = re.compile(r'\[([\w-]+)\]\((\S+) "(\w+)"\)')
KINDS = {
    "real": r"interop/|engine/test_\w+_real\w*\.py|engine/test_engine_real|conformance/",
    "recorded": r"dialect/test_(dialects_recorded|kv_stream)\.py",
    "documented": r"dialect/test_dialects_recorded\.py",
    "stand-in": r"net/|fault/|testing/|control/test_heartbeat\.py",
    "value": r"dialect/test_(handing|readings|kv_events)\.py|flow/|domain/|wire/|control/test_rounds\.py",
}
"""Where tests of each kind stand."""


class Shown(NamedTuple):
    """A link of the table: what kind of test it is said to be, and where that is."""

    dialect: str
    kind: str
    path: str
    name: str


def table() -> tuple[list[str], dict[str, list[str]]]:
    """Return the dialects of the columns, and the cells of every row by what stands before them."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.split("\n## ")[1].splitlines()
        if line.startswith("|")
    ]
    header, _, *body = rows
    dialects = [re.findall(r"`(\w+)`", cell)[0] for cell in header[1:]]
    return dialects, {row[0].strip("*"): row[1:] for row in body}


COLUMNS, ROWS = table()
SHOWN = [
    Shown(dialect, *link)
    for cells in ROWS.values()
    for dialect, cell in zip(COLUMNS, cells, strict=True)
    for link in LINK.findall(cell)
]


def test_every_dialect_is_a_column_and_every_capability_a_row() -> None:
    assert sorted(COLUMNS) == sorted(DIALECTS)
    assert tuple(ROWS) == CAPABILITIES


def test_every_cell_names_a_test() -> None:
    for capability, cells in ROWS.items():
        for dialect, cell in zip(COLUMNS, cells, strict=True):
            assert LINK.search(cell), f"{capability} of {dialect} is shown by nothing"
            assert cell.count("](") == len(LINK.findall(cell)), f"a link of {capability}: {cell}"


@pytest.mark.parametrize("shown", sorted({(each.path, each.name) for each in SHOWN}))
def test_every_test_that_is_named_is_there(shown: tuple[str, str]) -> None:
    path, name = shown
    file = (DOCS / path).resolve()
    assert file.is_relative_to(TESTS)
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse(file.read_text())
    assert name.startswith("test_")
    assert name in {node.name for node in tree.body if isinstance(node, functions)}


def test_a_test_is_of_the_kind_that_it_is_said_to_be() -> None:
    for each in SHOWN:
        path = each.path.removeprefix("../tests/")
        assert re.match(KINDS[each.kind], path), f"{each.name} in {path} is not {each.kind}"


def test_of_sglang_nothing_was_recorded_and_nothing_ran() -> None:
    kinds = {
        dialect: {each.kind for each in SHOWN if each.dialect == dialect} for dialect in COLUMNS
    }
    assert not kinds["sglang"] & {"real", "recorded"}
    assert all("documented" not in kinds[other] for other in COLUMNS if other != "sglang")


def test_each_engine_hands_over_by_the_connectors_of_its_dialect() -> None:
    said = {
        dialect: set(re.findall(r"`(\w+)`", cell))
        for dialect, cell in zip(COLUMNS, ROWS["Hand-off"], strict=True)
    }
    # Our own has no name among the options.
    assert said == {name: {each or "tl" for each in DIALECTS[name].connectors} for name in COLUMNS}
    assert set().union(*said.values()) == set(CONNECTORS)


def test_the_apis_that_an_engine_lacks_are_named() -> None:
    every = frozenset().union(*(dialect.paths for dialect in DIALECTS.values()))
    for dialect, cell in zip(COLUMNS, ROWS["APIs"], strict=True):
        if dialect in SERVES:
            assert set(re.findall(r"`(/\S+)`", cell)) == every - SERVES[dialect]


@pytest.mark.parametrize("connector", CONNECTORS)
def test_the_page_says_what_shows_that_the_cache_was_used(connector: str) -> None:
    proofs = PAGE.split("### Was the cache really used?")[1]
    assert f"`{connector}`" in "".join(re.findall(r"^\| ([^|]*) \|", proofs, re.MULTILINE))


@pytest.mark.parametrize("example", EXAMPLES)
def test_its_examples_and_that_of_the_readme_load(tmp_path: Path, example: str) -> None:
    path = tmp_path / "gateway.toml"
    heading = "" if "[gateway]" in example else '[gateway]\nlisten = "127.0.0.1:1"\n'
    path.write_text(heading + example)
    gateway = load(path, [], {}).gateway
    assert len((*gateway.workers, *gateway.dns, *gateway.worker_files)) > 1
