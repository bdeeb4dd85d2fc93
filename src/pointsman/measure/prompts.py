"""Prompts of about so many tokens, none like another: an engine with a prefix cache must never find one.

How many tokens a word has depends on the tokenizer, so it is learned from what the engine counted. Words are common
ones, which most tokenizers have as one token.
"""

from random import Random

__all__ = ["Prompts"]

TEXT = """
the of and to in is that for it was on are as with they at be this from have or by one had not but what all were when we
there can an your which their said if do will each about how up out them then she many some so these would other into
has more her two like him see time could no make than first been its who now people my made over did down only way find
use may water long little very after words called just where most know
"""
WORDS = TEXT.split()


class Prompts:
    """Texts of words that `random` draws.

    >>> prompts = Prompts(Random(1))
    >>> prompts.learn(prompts.text(100), 105)
    >>> len(prompts.text(210).split())
    200
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._tokens_per_word = 1.0

    def text(self, tokens: int) -> str:
        """Return a new text of about so many tokens, at least 1."""
        count = max(round(tokens / self._tokens_per_word), 1)
        return " ".join(self._random.choices(WORDS, k=count))

    def learn(self, text: str, tokens: int) -> None:
        """Learn how many tokens a text had (at least 1)."""
        self._tokens_per_word = tokens / len(text.split())
