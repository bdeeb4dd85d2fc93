"""The examples in the docstrings are true."""

import doctest
import importlib
import pkgutil

import pytest

import pointsman.config
import pointsman.domain
import pointsman.remote
import pointsman.testing
import pointsman.wire

MODULES = sorted(
    module.name
    for package in (
        pointsman.config,
        pointsman.domain,
        pointsman.remote,
        pointsman.testing,
        pointsman.wire,
    )
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run_as_shown(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_every_module_of_the_domain_is_among_them() -> None:
    assert {"pointsman.domain.registry", "pointsman.domain.policy.affinity"} <= set(MODULES)
