"""Each letter of a key is as likely as any other. The inputs are fixed, so these never flake; each bound is derived."""

from collections import Counter
from random import Random

import pytest

from pointsman.domain.keys import make_key

COUNT = 20_000


@pytest.mark.parametrize(
    ("part", "letters", "bound"),
    [
        # The 0.999 quantiles of chi-square at 31 and 61 degrees of freedom.
        (0, "abcdefghijklmnopqrstuvwxyz234567", 61.10),
        (1, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789", 100.89),
    ],
)
def test_no_letter_is_likelier_than_another(part: int, letters: str, bound: float) -> None:
    """A byte modulo 62 would make the first eight letters likelier by a quarter: a chi-square of thousands."""
    random_bytes = Random(1).randbytes
    counts: Counter[str] = Counter()
    for _ in range(COUNT):
        counts.update(make_key(random_bytes)[1].split("_")[1 + part])
    assert set(counts) == set(letters)
    expected = counts.total() / len(letters)
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < bound
