"""What the frontier says of its runs: how far a policy holds the level, and who is compared with whom."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
try:
    from frontier import Compared, Setup, _highest, _reach
finally:
    sys.path.pop(0)

from pointsman.simulate.compare import Row
from pointsman.simulate.measures import Mean


def rows(policy: str, good: dict[float, float]) -> list[Row]:
    return [
        Row(policy, load, 1, {"good": Mean(share, 0.0), "goodput": Mean(load * share, 0.0)})
        for load, share in good.items()
    ]


def compared(*made: Row) -> Compared:
    setup = Setup(spec="shared:", tried=[], ceiling=1.0, knee=10.0, tuned=[])
    return Compared("shared", setup, list(made), [])


@pytest.mark.parametrize(
    ("good", "said"),
    [
        ({0.5: 0.94, 1.0: 0.99}, "below 0.5"),
        ({0.5: 1.0, 1.0: 0.9}, "0.75"),
        ({0.5: 1.0, 0.7: 0.9, 1.0: 1.0}, "0.60"),  # where it first falls
        ({0.5: 1.0, 1.2: 0.95}, "above 1.2"),
    ],
)
def test_the_level_holds_up_to_where_a_line_between_two_loads_crosses_it(
    good: dict[float, float], said: str
) -> None:
    own = rows("affinity", good)
    assert _reach(compared(*own), own) == said


def test_the_highest_goodput_is_that_of_the_best_load_whichever_that_is() -> None:
    own = rows("least_outstanding", {0.5: 1.0, 1.0: 0.6, 1.2: 0.1})
    assert _highest(compared(*own), own) == "0.60 at 1"
