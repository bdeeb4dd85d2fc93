"""docs/apis.md names what is read, and nothing else."""

import re
from pathlib import Path

import msgspec
import pytest

from pointsman.config import GatewayConfig
from pointsman.dialect.engines import SERVES
from pointsman.wire.apis import api_of
from pointsman.wire.body import parse_request

PAGE = (Path(__file__).parents[2] / "docs" / "apis.md").read_text()
ROWS = [
    (re.findall("`([^`]+)`", cells[1]), re.findall("`([^`]+)`", cells[2]), cells[4])
    for line in PAGE.splitlines()
    if line.startswith("| `/")
    for cells in [line.split("|")]
]
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp"}


def test_every_path_that_is_routed_has_its_row() -> None:
    assert sorted(path for paths, _, _ in ROWS for path in paths) == sorted(GatewayConfig().paths)


MESSAGES = [{"role": "user", "content": "x"}]
MADE = {"messages": MESSAGES, "tokens": [7], "tools": [{"name": "x"}], "system": "x"}


@pytest.mark.parametrize(("paths", "fields", "_"), ROWS)
def test_the_fields_of_a_row_make_the_key(paths: list[str], fields: list[str], _: str) -> None:
    for path in paths:
        api = api_of(path)
        for field in [] if api.form else set(fields) - {"model", "stream"}:
            if field.startswith("/"):  # as for another path
                continue
            body = {"model": "m", field: MADE.get(field, "x")}
            assert parse_request(msgspec.json.encode(body), "r", 64, api).prefix_key, (path, field)


@pytest.mark.parametrize(("paths", "_", "engines"), ROWS)
def test_the_engines_of_a_row_are_those_whose_dialect_has_the_path(
    paths: list[str], _: list[str], engines: str
) -> None:
    known = {path for serves in SERVES.values() for path in serves}
    for path in known.intersection(paths):
        for dialect, serves in SERVES.items():
            named = "all" in engines or ENGINES[dialect] in engines
            assert named is (path in serves), (path, dialect)
