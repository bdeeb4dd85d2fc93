"""A request whose prompt is told in tokens before it is routed, so that policies compare what engines cache.

It comes before whichever story the request has. A tokenizer that fails, or takes too long, is no reason to refuse
anybody: the prompt is compared as bytes then, like every other.
"""

from pointsman.domain.blocks import root_of
from pointsman.flow.effects import Encode, Encoded, Flow, Lost, PromptText, Tokenizer
from pointsman.flow.exchange import Exchange

__all__ = ["tokenized"]

ENCODE_S = 1.0
"""Seconds that a tokenizer may take, in the queue for its threads or at work; the request waits so long."""


def tokenized(
    x: Exchange,
    story: Flow,
    tokenizer: Tokenizer,
    prompt: PromptText,
    block_tokens: int,
    adapter: str = "",
) -> Flow:
    """Tell the request its tokens, in blocks of `block_tokens`, and go on with its story."""
    result = yield Encode(tokenizer, prompt, ENCODE_S)
    assert isinstance(result, Encoded | Lost)
    if isinstance(result, Encoded) and result.ids:
        x.request.use_tokens(result.ids, block_tokens, root_of(adapter))
    return (yield from story)
