"""The profiles that come with the package."""

import re
import tomllib

import pytest
from msgspec.structs import fields

from pointsman.simulate.profile import OF_PAIRS, RANGES, EngineProfile
from pointsman.simulate.sources import PROFILES, profile_names, profile_of


@pytest.mark.parametrize("name", profile_names())
def test_a_profile_says_where_its_numbers_come_from(name: str) -> None:
    values = tomllib.loads((PROFILES / f"{name}.toml").read_text())
    source = values.pop("source")
    profile = profile_of(name)
    assert {"engine", "model", "hardware", "by"} <= set(source)
    if source["by"].startswith("pointsman profile "):
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", source["measured"])
    else:
        assert {"title", "url", "published", "figures"} <= set(source)
    # What is not in the file is a default, and the source says so.
    for field in fields(EngineProfile):
        if field.name not in values and field.name not in OF_PAIRS:
            assert field.name in source["assumed"], field.name
            assert getattr(profile, field.name) == field.default


def test_every_number_of_a_profile_has_a_range() -> None:
    numbers = {field.name for field in fields(EngineProfile) if field.type in (int, float)}
    assert set(RANGES) == numbers
