"""The page about migrating is what the program goes by, and names no key of ours that does not exist."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pointsman.cli_import import import_app
from pointsman.config import load, schema
from pointsman.domain.policy import POLICIES as OURS
from pointsman.migrate.page import RULES, migration_tables
from pointsman.migrate.policies import POLICIES
from pointsman.migrate.rules import Rule

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
KEYS = {name: set(table.get("properties", {})) | {""} for name, table in schema()["$defs"].items()}
EVERY_KEY = set().union(*KEYS.values())


def test_the_tables_of_the_page_are_those_of_the_program() -> None:
    assert PAGE.endswith(migration_tables())
    assert CliRunner().invoke(import_app, ["reference"]).stdout == migration_tables()


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_every_row_writes_a_key_that_exists(rules: Mapping[str, Rule]) -> None:
    for theirs, rule in rules.items():
        if rule.to.startswith("each."):
            assert rule.to.removeprefix("each.") in KEYS["StaticWorker"], theirs
        elif rule.read is not None:
            assert rule.to in KEYS["GatewayConfig"], theirs
        else:
            named = re.sub(r"\[\[gateway\.(\w+)\]\]", r"\1", rule.to)
            assert named in EVERY_KEY, theirs


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_every_row_that_writes_nothing_says_why(rules: Mapping[str, Rule]) -> None:
    assert all(rule.why for rule in rules.values() if not rule.to)


def test_every_policy_of_theirs_becomes_one_of_ours() -> None:
    assert {choice.policy for choice in POLICIES.values()} <= set(OURS)


def test_the_example_of_the_page_loads(tmp_path: Path) -> None:
    [example] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "gateway.toml"
    path.write_text('[gateway]\nlisten = "127.0.0.1:1"\n' + example)
    assert [each.capacity for each in load(path, [], {}).gateway.workers] == [3, 1]
