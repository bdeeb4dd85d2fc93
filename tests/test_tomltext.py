"""Values as TOML text are read back as they were."""

import doctest
import tomllib

import pytest

from pointsman import tomltext
from pointsman.tomltext import toml_field, toml_key


@pytest.mark.parametrize(
    "value",
    [
        *("", 'a"b\\c', "tab\t, line\n, bell\x07, del\x7f", "é \u2028 \U000e0001", 0, -1.5, True),
        *([], [1, 2], {"a b": "c", "d": [True]}, [{"a": 1}, {"b": "x"}]),
    ],
)
def test_a_value_is_read_back(value: object) -> None:
    assert tomllib.loads(f"{toml_key('the key')} = {toml_field(value)}") == {"the key": value}


def test_the_example_is_true() -> None:
    assert doctest.testmod(tomltext).failed == 0
