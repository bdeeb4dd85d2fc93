"""From options to parts: what `pointsman.app` puts together is made here, one function per part.

Nothing is started. Whatever an option asks for that cannot be had is a ConfigError that names the option.
"""

import os
import random
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import TypeAlias

import msgspec

from pointsman.config import (
    Address,
    ConfigError,
    EngineOptions,
    GatewayConfig,
    SourceOptions,
    StaticWorker,
    Unusable,
)
from pointsman.control.changes import Static
from pointsman.control.discovery.found import Found
from pointsman.control.keyfile import KeyFile, KeyFileError, read_pepper
from pointsman.control.mounts import Application as Asgi
from pointsman.control.mounts import MountError, load_mount
from pointsman.control.store import Store, StoreError
from pointsman.domain.acceptor import Acceptor, acceptor_from_json
from pointsman.domain.keys import ANONYMOUS, Keyring, Principal, Scope
from pointsman.domain.pairing import Pairing, PairingOptions
from pointsman.domain.policy import Policy, PolicyOptions, asks_index, make_policy
from pointsman.domain.prefix_index import PrefixIndex
from pointsman.domain.worker import Worker
from pointsman.errors import BadRequest, BadRule
from pointsman.net.dataplane import TokenBlocks
from pointsman.net.limits import DownstreamLimits, UpstreamLimits
from pointsman.net.tokenizing import LocalTokenizer, TokenizerUnusable

__all__ = [
    "Application",
    "acceptors",
    "check_kv_events",
    "downstream_limits",
    "found_worker",
    "key_file",
    "mounts",
    "pairing",
    "permit_key",
    "policy",
    "prefix_index",
    "static_worker",
    "store",
    "token_blocks",
    "tokenizers",
    "upstream_limits",
    "whoever",
]

OPERATOR = Principal("", "anonymous", frozenset((Scope.INFER, Scope.EMBED, Scope.ADMIN)))
"""Whoever asks a gateway without keys that only its own machine can reach."""

API_KEY = re.compile(rb"[\x21-\x7e]{1,4096}")

Application: TypeAlias = tuple[str, Asgi, Scope | None]
"""A path, what is served there, and the scope that a key needs for it; None lets everybody in."""


def store(options: GatewayConfig) -> Store:
    """Return what outlives a restart; without a folder it only lives as long as the process."""
    try:
        return Store(Path(options.state_dir) if options.state_dir else None)
    except StoreError as error:
        raise ConfigError(str(error)) from error


def key_file(options: GatewayConfig, environ: Mapping[str, str]) -> tuple[KeyFile, Keyring] | None:
    """Return the API keys, loaded, None where there are none."""
    if not options.keys_file:
        return None
    try:
        pepper = read_pepper(environ, options.pepper_env)
    except ValueError as error:
        raise ConfigError(f'gateway.keys_file = "{options.keys_file}": {error}') from None
    keyring = Keyring(
        pepper,
        ttl_s=options.key_cache_ttl_s,
        wall=time.time,
        cache_key=secrets.token_bytes(32),
    )
    keys = KeyFile(Path(options.keys_file), keyring)
    try:
        keys.load()
    except KeyFileError as error:
        raise ConfigError(f"gateway.keys_file: {error}") from None
    return keys, keyring


def whoever(options: GatewayConfig) -> Callable[[bytes | None, float], Principal]:
    """Return how callers are admitted where there are no keys.

    Whoever can reach a loopback address sits at this machine, and may administer the gateway; nobody else may.
    """
    principal = OPERATOR if Address.parse(options.listen).is_loopback else ANONYMOUS
    return lambda authorization, now: principal


def acceptors(options: GatewayConfig) -> dict[str, Acceptor]:
    """Return the learned acceptors of cascades, by name."""
    found = {}
    for index, each in enumerate(options.acceptors):
        try:
            found[each.name] = acceptor_from_json(Path(each.file).read_bytes())
        except (OSError, BadRule) as error:
            where = f'gateway.acceptors[{index}].file = "{each.file}"'
            raise ConfigError(f"{where}: {error}") from None
    return found


def tokenizers(
    options: GatewayConfig, former: Mapping[str, LocalTokenizer] | None = None
) -> dict[str, LocalTokenizer]:
    """Return the gateway's own tokenizers, by model. Those of `former` whose files have not changed stay.

    To make one holds the interpreter for the time of reading its vocabulary, tenths of a second.
    """
    found = {}
    for index, each in enumerate(options.tokenizers):
        where = f"gateway.tokenizers[{index}]"
        file = _bytes(f"{where}.file", each.file)
        template = None
        if each.chat_template:
            key = f"{where}.chat_template"
            try:
                template = _bytes(key, each.chat_template).decode()
            except UnicodeDecodeError as error:
                raise ConfigError(f'{key} = "{each.chat_template}": {error}') from None
        source = (file, template, each.bos_token, each.eos_token)
        tokenizer = (former or {}).get(each.model)
        if tokenizer is None or tokenizer.source != source:
            try:
                tokenizer = LocalTokenizer(*source)
            except TokenizerUnusable as error:
                path = getattr(each, error.part)
                raise ConfigError(f'{where}.{error.part} = "{path}": {error}') from None
        found[each.model] = tokenizer
    return found


def _bytes(key: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f'{key} = "{path}": {error.strerror}') from None


def mounts(options: GatewayConfig) -> list[Application]:
    """Return the applications that the configuration mounts, imported."""
    try:
        return [
            (each.path, load_mount(each), None if each.scope == "none" else Scope(each.scope))
            for each in options.mounts
        ]
    except MountError as error:
        raise ConfigError(f"gateway.mounts: {error}") from error


def prefix_index(options: GatewayConfig) -> PrefixIndex:
    """Return the empty index of what workers have cached, for every policy of this process."""
    return PrefixIndex(options.prefix_index_blocks_max, options.prefix_index_ttl_s)


def policy(options: GatewayConfig, index: PrefixIndex) -> Policy:
    """Return the policy, which asks `index` if it asks one.

    Equal options make equal policies but for the salt, which is the process's own.
    """
    salt = f"{socket.gethostname()} {os.getpid()}".encode()
    try:
        return make_policy(
            options.route_policy,
            PolicyOptions(
                load_factor=options.affinity_load_factor,
                tie_break=options.tie_break,
                salt=salt,
                prefix_index=index,
                ttft_target_s=options.ttft_target_s,
            ),
            random.Random(),
        )
    except ValueError as error:
        raise ConfigError(f"gateway.route_policy: {error}") from None


def pairing(options: GatewayConfig, index: PrefixIndex) -> Pairing | None:
    """Return what decides whether prompts are handed off, None where all are; it asks the index of the policy."""
    if options.disagg_pairing == "always":
        return None
    return Pairing(
        index,
        PairingOptions(
            prefill_tokens_per_s=options.disagg_prefill_tokens_per_s,
            transfer_tokens_per_s=options.disagg_transfer_tokens_per_s,
            handoff_s=options.disagg_handoff_s,
            stall=options.disagg_stall_weight,
        ),
    )


def token_blocks(
    options: GatewayConfig, tokenizers: Mapping[str, LocalTokenizer], policy: Policy
) -> dict[str, TokenBlocks]:
    """Return whose prompts are compared by their tokens, by model: nobody's where no policy compares them."""
    if not asks_index(policy):
        return {}
    return {
        each.model: TokenBlocks(tokenizers[each.model], each.block_tokens)
        for each in options.tokenizers
        if each.block_tokens
    }


def check_kv_events(options: GatewayConfig) -> None:
    """Raise ConfigError where engines' KV events are to be read, and the extra for that is not installed."""
    if find_spec("zmq") is not None:
        return
    sources = {
        "dns": options.dns,
        "worker_files": options.worker_files,
        "kubernetes": options.kubernetes,
    }
    wanted = [
        *(f"workers[{n}].kv_events" for n, each in enumerate(options.workers) if each.kv_events),
        *(
            f"{name}[{n}].kv_events_port"
            for name, tables in sources.items()
            for n, each in enumerate(tables)
            if each.kv_events_port
        ),
    ]
    if wanted:
        raise ConfigError(f"gateway.{wanted[0]}: install the extra, pointsman[kv-events]")


def static_worker(values: Static, environ: Mapping[str, str] = os.environ) -> Worker:
    """Return the worker of an entry of `workers`, with its engine's key. Raises BadRequest with `param`."""
    try:
        static = msgspec.convert(values, StaticWorker)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error)) from None
    try:
        return static.worker(_credentials(static, environ))
    except Unusable as error:
        raise _refused(static.id, error) from None


def permit_key(values: Static, options: GatewayConfig) -> None:
    """Check that a worker that the admin API lists names no other key than the configuration file does.

    Whoever lists a worker says where its key is sent. So the operator of the machine says what is a key of an engine at
    all: any other variable or file may hold a secret of the gateway or of its host. Raises BadRequest with `param`,
    and says nothing of what is there.
    """
    listed = (*options.workers, *options.dns, *options.worker_files, *options.kubernetes)
    for key in ("api_key_env", "api_key_file"):
        name = values.get(key)
        if name and name not in {getattr(each, key) for each in listed}:
            raise BadRequest(
                f"{key}: only what the configuration file itself uses as {key} can be named here",
                param=key,
            )


def found_worker(
    source: SourceOptions, found: Found, name: str, environ: Mapping[str, str] = os.environ
) -> Worker:
    """Return the worker of an engine that a source called `name` found; what its labels say comes first.

    Raises BadRequest with `param`, the label or key that cannot be used.
    """
    worker_id = found.labels.get("id", found.id)
    try:
        options = source.labelled(found.labels)
        return options.found(
            worker_id,
            found.address,
            credentials=_credentials(options, environ),
            source=name,
            terminating=found.draining,
        )
    except Unusable as error:
        raise _refused(worker_id, error) from None


def _refused(worker_id: str, error: Unusable) -> BadRequest:
    return BadRequest(f"worker {worker_id[:256]}: {error.key}: {error}", param=error.key)


def _credentials(engine: EngineOptions, environ: Mapping[str, str]) -> bytes:
    """Return the header line with an engine's key, b"" for none. Raises Unusable, which never says the key."""
    if engine.api_key_env:
        key, name = "api_key_env", engine.api_key_env
        if name not in environ:
            raise Unusable(key, f"there is no environment variable {name}")
        said = environ[name].encode(errors="surrogateescape")
    elif engine.api_key_file:
        key, name = "api_key_file", engine.api_key_file
        try:
            said = Path(name).read_bytes()
        except OSError as error:
            raise Unusable(key, f"{name}: {error.strerror}") from None
    else:
        return b""
    secret = said.strip()
    if not API_KEY.fullmatch(secret):
        raise Unusable(key, f"{name} has no API key: expected printable ASCII without spaces")
    return b"authorization: Bearer " + secret + b"\r\n"


def upstream_limits(options: GatewayConfig) -> UpstreamLimits:
    """Return what an engine may take."""
    return UpstreamLimits(
        connect_s=options.connect_timeout_s,
        head_s=options.head_timeout_s,
        first_byte_s=options.first_byte_timeout_s,
        gap_s=options.gap_timeout_s,
        total_s=options.total_timeout_s or inf,
        keepalive_s=options.upstream_keepalive_s,
        idle_max=options.upstream_idle_max,
        connections=options.upstream_connections_max,
        # A model can only be renamed in an answer that is there in full.
        hold_bytes=options.hold_bytes
        if options.response_model == "served"
        else options.max_body_bytes,
    )


def downstream_limits(options: GatewayConfig) -> DownstreamLimits:
    """Return what a client may take."""
    return DownstreamLimits(
        head_s=options.header_timeout_s,
        body_s=options.body_timeout_s,
        keepalive_s=options.keepalive_timeout_s,
        head_bytes=options.max_header_bytes,
        body_bytes=options.max_body_bytes,
        connections=options.connections_max,
    )
