"""The small tables of the configuration, each a list beside the options."""

from typing import Annotated, Literal

from msgspec import Struct

from pointsman.config.option import option

__all__ = ["LearnedAcceptor", "Mount", "TokenizerFile"]


class Mount(Struct, frozen=True, forbid_unknown_fields=True):
    """An ASGI application of yours, served on the API port under a path of its own."""

    path: Annotated[str, option("Path prefix, such as `/pages`.")]
    app: Annotated[str, option("Where it is imported from: `package.module:name`.")]
    scope: Annotated[
        Literal["infer", "embed", "admin", "debug", "none"],
        option("Scope that a key needs for it; `none` lets everybody in."),
    ] = "admin"


class LearnedAcceptor(Struct, frozen=True, forbid_unknown_fields=True):
    """A learned acceptor, which the rules of cascades ask by its name: `accept_if = "score > 0.8"`."""

    name: Annotated[str, option("What steps call it in `acceptor`, unique.", min_length=1)]
    file: Annotated[str, option("The file that `pointsman cascade sweep --train` wrote.")]


class TokenizerFile(Struct, frozen=True, forbid_unknown_fields=True):
    """A tokenizer of a model, for hand-offs: the gateway tokenizes, and need not ask the prefill worker for it.

    With `block_tokens`, policies with a prefix index compare prompts by their tokens, as the KV events of engines do.

    Its ids must be those of the workers: a decode worker refuses what was computed from others, and events tell of
    other blocks. Needs the extra `pointsman[tokenizers]`.
    """

    model: Annotated[str, option("Id of the model as its workers report it, unique.", min_length=1)]
    file: Annotated[str, option("Its `tokenizer.json`, in the format of Hugging Face.")]
    chat_template: Annotated[
        str,
        option(
            "File of the Jinja template by which the workers make a text of messages. "
            "Empty: chats are tokenized by the prefill worker."
        ),
    ] = ""
    bos_token: Annotated[str, option("What the template finds in `bos_token`.")] = ""
    eos_token: Annotated[str, option("What the template finds in `eos_token`.")] = ""
    block_tokens: Annotated[
        int,
        option(
            "Size of the blocks in which cached prompts of this model are compared: best that of its engines. "
            "0: prompts are compared as bytes, and KV events are of no use.",
            unit="tokens",
            ge=0,
            le=65536,
        ),
    ] = 0
