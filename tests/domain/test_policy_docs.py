"""The page about policies has a section for each, and its example keeps the contract."""

import re
from pathlib import Path
from random import Random
from typing import Any

from pointsman.domain.policy import POLICIES, PolicyOptions
from pointsman.testing.policies import check_policy

PAGE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()


def test_every_policy_has_a_section() -> None:
    headings = set(re.findall(r"^## (.*)$", PAGE, re.MULTILINE))
    assert set(POLICIES) <= headings


def test_the_policy_written_on_the_page_keeps_the_contract() -> None:
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(# my_policies\.py.*?)```", PAGE, re.DOTALL)[0], names)
    check_policy(names["MostFreeBlocks"])
    assert names["most_free_blocks"](PolicyOptions(), Random(1)) is not None
