"""What routing may know of a request: a handful of facts, never the whole body.

The body itself stays raw bytes and goes to the engine as the client sent it. The values that an affinity policy may
look at (`system`, `tools`, `prompt`, `messages`) are kept as raw JSON too, and are rendered only when a policy asks for
the key, or for the blocks of the whole. Which fields of a body they are is the API's, see `pointsman.wire.apis`.
"""

from collections.abc import Sequence
from typing import Self

import msgspec

from pointsman.domain.blocks import TOKEN_BYTES, block_hashes, pack_tokens, tokens_in
from pointsman.domain.prefix import render_prefix, render_prompt

__all__ = ["InferenceRequest"]

BLOCKS_KEPT = 16
"""How many blocks the record of a request keeps; no pick can be explained by more once the others were forgotten."""


class InferenceRequest(msgspec.Struct, eq=False, gc=False):
    """One request as the policies see it.

    `model` is the id that the client asked for; `request_id` also draws the canary backend; `stream` is true only for
    the JSON value true; `prompt`, `messages`, `system` and `tools` are raw JSON, None where absent; `affinity_bytes` is
    how much of the rendered prompt makes the affinity key; `path` is the API path that was asked, "" for any;
    `model_at` is where the model stands in a body that is a form (first byte, and the one behind the last);
    `block_bytes` is the size of a block of the rendered prompt (at least 4).
    """

    model: str
    request_id: str
    stream: bool = False
    prompt: bytes | msgspec.Raw | None = None
    messages: bytes | msgspec.Raw | None = None
    affinity_bytes: int = 64
    path: str = ""
    system: bytes | msgspec.Raw | None = None
    tools: bytes | msgspec.Raw | None = None
    model_at: tuple[int, int] | None = None
    block_bytes: int = 512
    _prefix_key: bytes | None = None
    _blocks: tuple[int, ...] | None = None
    _prompt_tokens: int = -1

    @classmethod
    def of_blocks(
        cls,
        model: str,
        request_id: str,
        blocks: tuple[int, ...],
        prompt_tokens: int,
        block_tokens: int = 512,
        prefix_key: bytes | None = None,
    ) -> Self:
        """Return a request of which no more is known than the blocks of its prompt, from a record or a trace.

        Its prefix key is made of the first block, unless `prefix_key` is there.

        >>> request = InferenceRequest.of_blocks("m", "r1", (7, 8), 1100)
        >>> request.blocks, request.block_tokens, request.prompt_tokens, request.prefix_key.hex()
        ((7, 8), 512, 1100, '0000000000000007')
        """
        key = prefix_key
        if key is None:
            key = blocks[0].to_bytes(8, "big") if blocks else b""
        return cls(
            model,
            request_id,
            block_bytes=block_tokens * TOKEN_BYTES,
            _prefix_key=key,
            _blocks=blocks,
            _prompt_tokens=prompt_tokens,
        )

    def use_tokens(self, ids: Sequence[int], block_tokens: int, root: int | None = None) -> None:
        """Let the blocks be those of token ids, in blocks of so many, and `root` what their chain begins with.

        Raises `struct.error` for what is no id.

        >>> request = InferenceRequest("m", "r1", prompt=b'"Once upon a time"')
        >>> request.use_tokens([7, 8, 9, 10, 11], 2)
        >>> len(request.blocks), request.block_tokens, request.prompt_tokens
        (2, 2, 5)
        """
        size = block_tokens * TOKEN_BYTES
        self._blocks = block_hashes(pack_tokens(ids), size, parent=root)
        self.block_bytes = size
        self._prompt_tokens = len(ids)

    def forget(self) -> None:
        """Let go of the client's text; a record of the request may be kept for long, its prompt may not.

        Of the blocks, where somebody asked for them, the first 16 stay.

        >>> request = InferenceRequest("m", "r1", prompt=b'"Once upon a time"')
        >>> request.forget()
        >>> request.prompt, request.prefix_key
        (None, b'')
        """
        self.prompt = self.messages = self.system = self.tools = None
        if self._blocks:
            self._blocks = self._blocks[:BLOCKS_KEPT]

    @property
    def prefix_key(self) -> bytes:
        """The leading bytes of the rendered prompt, computed on first use.

        >>> InferenceRequest("m", "r1", prompt=b'"Once upon a time"').prefix_key
        b'Once upon a time'
        """
        key = self._prefix_key
        if key is None:
            key = render_prefix(
                self.prompt, self.messages, self.affinity_bytes, self.system, self.tools
            )
            self._prefix_key = key
        return key

    @property
    def blocks(self) -> tuple[int, ...]:
        """The hashes of the leading blocks of the rendered prompt (`pointsman.domain.blocks`), computed on first use.

        >>> prompt = b'"%b"' % (b"x" * 1100)
        >>> len(InferenceRequest("m", "r1", prompt=prompt).blocks)
        2
        """
        blocks = self._blocks
        if blocks is None:
            text = self._rendered()
            self._prompt_tokens = tokens_in(len(text))
            self._blocks = blocks = block_hashes(text, self.block_bytes)
        return blocks

    @property
    def block_tokens(self) -> int:
        """How many tokens a block has: an estimate, unless the prompt is token ids."""
        return self.block_bytes // TOKEN_BYTES

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the whole prompt has, estimated in the same way, computed on first use.

        >>> InferenceRequest("m", "r1", prompt=b'"Once upon a time"').prompt_tokens
        4
        """
        tokens = self._prompt_tokens
        if tokens < 0:
            tokens = self._prompt_tokens = tokens_in(len(self._rendered()))
        return tokens

    def _rendered(self) -> bytes:
        return render_prompt(self.prompt, self.messages, self.system, self.tools)
