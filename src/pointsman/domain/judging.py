"""Whether an answer is right, or says the same as another one: text compared by its words, without another model.

Case, punctuation and the forms of a character that Unicode holds for compatible do not count. What it does not do:
understand. "Not Paris" mentions Paris, and two sentences of one meaning and other words do not agree.

Sources: the normalisation and the F1 over words follow Rajpurkar et al., SQuAD, 2016.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

__all__ = ["agreement", "equals", "mentions", "words"]

# A sign belongs to a number only where it begins a word: "5-3" are two numbers.
_WORD = re.compile(r"(?:(?<!\w)[-−])?\d+(?:[.,]\d+)*|\w+")


def words(text: str) -> list[str]:
    """Return the words and numbers of a text, folded.

    >>> words("It IS 1,024 - or -3.5!")
    ['it', 'is', '1024', 'or', '-3.5']
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    return [_number(word) for word in _WORD.findall(folded)]


def equals(text: str, answers: Sequence[str]) -> bool:
    """Tell whether a text has the words of one of the `answers`, in order, and no others.

    >>> equals(" Paris.", ["paris"]), equals("It is Paris", ["Paris"])
    (True, False)
    """
    return words(text) in [words(answer) for answer in answers]


def mentions(text: str, answers: Sequence[str]) -> bool:
    """Tell whether the words of one of the `answers` stand in a text side by side. An answer without words never does.

    >>> mentions("It is New York, I think.", ["new york"]), mentions("15", ["5"])
    (True, False)
    """
    line = f" {' '.join(words(text))} "
    return any(found and f" {' '.join(found)} " in line for found in map(words, answers))


def agreement(one: str, other: str) -> float:
    """Return how far two texts consist of the same words, 0.0 to 1.0: F1 over them, order aside. Two empty texts: 1.0.

    >>> agreement("Paris", "paris."), round(agreement("It is Paris", "Paris"), 2), agreement("a", "b")
    (1.0, 0.5, 0.0)
    """
    mine, others = Counter(words(one)), Counter(words(other))
    total = mine.total() + others.total()
    return 2 * (mine & others).total() / total if total else 1.0


def _number(word: str) -> str:
    """Return a number without the commas between thousands, and with an ASCII sign."""
    if word[-1].isdecimal():
        word = word.replace("−", "-")
        if re.fullmatch(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?", word):
            return word.replace(",", "")
    return word
