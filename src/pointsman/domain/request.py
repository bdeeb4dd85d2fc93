"""What routing may know of a request: a handful of facts, never the whole body.

The body itself stays raw bytes and goes to the engine as the client sent it. The values that an affinity policy may
look at (`system`, `tools`, `prompt`, `messages`) are kept as raw JSON too, and are rendered only when a policy asks for
the key. Which fields of a body they are is the API's, see `pointsman.wire.apis`.
"""

import msgspec

from pointsman.domain.prefix import render_prefix

__all__ = ["InferenceRequest"]


class InferenceRequest(msgspec.Struct, eq=False, gc=False):
    """One request as the policies see it.

    `model` is the id that the client asked for; `request_id` also draws the canary backend; `stream` is true only for
    the JSON value true; `prompt`, `messages`, `system` and `tools` are raw JSON, None where absent; `affinity_bytes` is
    how much of the rendered prompt makes the affinity key; `path` is the API path that was asked, "" for any;
    `model_at` is where the model stands in a body that is a form (first byte, and the one behind the last).
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
    _prefix_key: bytes | None = None

    def forget(self) -> None:
        """Let go of the client's text; a record of the request may be kept for long, its prompt may not.

        >>> request = InferenceRequest("m", "r1", prompt=b'"Once upon a time"')
        >>> request.forget()
        >>> request.prompt, request.prefix_key
        (None, b'')
        """
        self.prompt = self.messages = self.system = self.tools = None

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
