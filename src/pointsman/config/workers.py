"""The engines that the configuration lists, one by one."""

from typing import Annotated

from pointsman.config.engines import EngineOptions
from pointsman.config.option import option
from pointsman.config.values import Address, Surface, Unusable
from pointsman.domain.registry import STATIC
from pointsman.domain.worker import Role, Worker

__all__ = ["StaticWorker"]

ADDRESSES = {"grpc_address": Role.PREFILL, "kv_address": Role.DECODE}
"""What a worker of our own contract needs beside `url`, and for which role."""


class StaticWorker(EngineOptions, frozen=True, forbid_unknown_fields=True):
    """An engine that sends no heartbeats. It is asked how it is, or counts as alive as long as it is listed."""

    id: Annotated[str, option("Name of the worker, unique.", min_length=1)]
    url: Annotated[
        str,
        option(
            "Where its OpenAI surface is: `http://host:port` or `https://host:port`, or with a path."
        ),
    ]
    grpc_address: Annotated[
        str,
        option("`host:port` of its EngineControl service. A prefill worker of `tl` needs one."),
    ] = ""
    kv_address: Annotated[
        str,
        option("`host:port` of its KvTransferService. A decode worker of `tl` needs one."),
    ] = ""

    kv_events: Annotated[
        str,
        option(
            "Where it publishes what it caches (vLLM and SGLang: `--kv-events-config`), as `tcp://host:port`. Of use "
            "where a tokenizer of its model has `block_tokens`. Needs the extra `pointsman[kv-events]`."
        ),
    ] = ""
    kv_replay: Annotated[
        str,
        option("Where it can be asked for events once more (its `replay_endpoint`), likewise."),
    ] = ""

    def worker(self, credentials: bytes = b"") -> Worker:
        """Return the worker to add to the registry; `credentials` is the header line that its engine wants.

        Raises Unusable for a `url` that is none, and for what the dialect or the role does not allow.

        >>> StaticWorker(id="a", url="http://10.0.0.7:8000/x/", model="m").worker().base_path
        '/x'
        """
        try:
            surface = Surface.parse(self.url)
        except ValueError as error:
            raise Unusable("url", str(error)) from None
        for key, role in ADDRESSES.items():
            self._check_address(key, needed=self.is_own and self.role is role)
        return self.make(
            self.id,
            surface,
            grpc_address=self.grpc_address,
            kv_address=self.kv_address,
            credentials=credentials,
            source=STATIC,
            kv_events=self._published("kv_events"),
            kv_replay=self._published("kv_replay"),
        )

    def _published(self, key: str) -> Address | None:
        text = getattr(self, key)
        if not text:
            return None
        if key == "kv_replay" and not self.kv_events:
            raise Unusable(key, "of no use without `kv_events`")
        try:
            address = Address.parse(text.removeprefix("tcp://"))
            if not text.startswith("tcp://") or not all(address):
                raise ValueError("scheme, host or port is missing")
        except ValueError as error:
            raise Unusable(key, f"{error}; expected tcp://host:port") from None
        return address

    def _check_address(self, key: str, *, needed: bool) -> None:
        text = getattr(self, key)
        if needed and not text:
            raise Unusable(key, f"a {self.role} worker needs one, or the `dialect` of its engine")
        try:
            if text and not all(Address.parse(text)):
                raise ValueError("host or port is missing")
        except ValueError as error:
            raise Unusable(key, f"{error}; expected host:port") from None
