"""What no single key shows: values with a grammar, and values that need others."""

import re
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import entry_points

from pointsman.certificates import TlsError
from pointsman.config.certificates import tls_files
from pointsman.config.engines import EngineOptions
from pointsman.config.options import GatewayConfig
from pointsman.config.sources import SourceOptions
from pointsman.config.values import Address, ConfigError, Unusable
from pointsman.config.words import nearest, shown
from pointsman.config.workers import StaticWorker
from pointsman.domain.policy import ENTRY_POINTS, POLICIES
from pointsman.domain.registry import InvalidReport, Registry
from pointsman.domain.routes import Route, RouteTable
from pointsman.errors import InvalidRoutes

__all__ = ["check", "servable"]

PATH = re.compile(r"(/[A-Za-z0-9._~!$&'()*+,;=:@-]+)+")

NOT_SERVED = ("upstream", "policy_file", "usage_db")
"""Options of the contract whose features do not exist yet: silence would be a lie."""


def check(gateway: GatewayConfig, origin: Mapping[str, str]) -> None:
    """Refuse what no single key shows: values with a grammar, and values that need others."""

    def refuse(key: str, why: str) -> ConfigError:
        value = getattr(gateway, key)
        return ConfigError(f"{origin.get(key, f'gateway.{key}')} = {shown(value)}: {why}")

    for key in ("listen", "health_listen", "registry_listen"):
        try:
            Address.parse(getattr(gateway, key))
        except ValueError as error:
            raise refuse(key, f"{error}; expected host:port, :port or [IPv6]:port") from None
    for key in NOT_SERVED:
        if getattr(gateway, key):
            raise refuse(key, "not served by this version; leave it empty")
    policies = sorted({*POLICIES, *(found.name for found in entry_points(group=ENTRY_POINTS))})
    if gateway.route_policy not in policies:
        raise refuse(
            "route_policy",
            f"no such policy; the nearest valid name is "
            f"{nearest(gateway.route_policy, policies)} (of {', '.join(policies)})",
        )
    try:
        _check_tls(gateway)
    except TlsError as error:
        raise refuse(error.pem.option, error.why) from None
    _check_paths(gateway.paths)
    _check_mounts(gateway)
    _check_workers(gateway.workers)
    _check_unique(gateway, "dns", "name", "port")
    _check_unique(gateway, "worker_files", "file")
    _check_unique(gateway, "kubernetes", "namespace", "selector", "inference_pool")
    for option in ("dns", "worker_files", "kubernetes"):
        for index, source in enumerate(getattr(gateway, option)):
            _check_source(f"gateway.{option}[{index}]", source)
    _check_unique(gateway, "tokenizers", "model")
    _check_unique(gateway, "acceptors", "name")
    _check_routes(gateway.routes, [each.name for each in gateway.acceptors])
    open_to_all = not (gateway.keys_file or gateway.allow_unauthenticated)
    if open_to_all and not Address.parse(gateway.listen).is_loopback:
        raise refuse(
            "listen",
            "without keys whoever can reach this address may use it. Set gateway.listen to a "
            'loopback address such as "127.0.0.1:8080", give it keys with gateway.keys_file, or say '
            "that this is wanted with gateway.allow_unauthenticated = true",
        )


def servable(routes: Sequence[Route], acceptors: Collection[str] = ()) -> None:
    """Raise InvalidRoutes for a rule whose learned acceptor is none of the configuration's."""
    for index, route in enumerate(routes):
        for number, step in enumerate(route.cascade):
            if step.acceptor and step.acceptor not in acceptors:
                where = f"routes[{index}].cascade[{number}].acceptor"
                known = ", ".join(sorted(acceptors)) or "none"
                raise InvalidRoutes(
                    f"{where}: there is no acceptor {step.acceptor[:64]!r} in `gateway.acceptors`; "
                    f"there are: {known}",
                    param=where,
                )


def _check_tls(gateway: GatewayConfig) -> None:
    sides = tls_files(gateway)
    sides.api.check(server=True)
    sides.registry.check(server=True)
    sides.upstream.check(server=False)


def _check_paths(paths: Sequence[str]) -> None:
    for index, path in enumerate(paths):
        where = f"gateway.paths[{index}] = {shown(path)}"
        if not PATH.fullmatch(path):
            raise ConfigError(f"{where}: expected a path such as /v1/chat/completions")
        if path in paths[:index]:
            raise ConfigError(f"{where}: it is there already")


def _check_mounts(gateway: GatewayConfig) -> None:
    for index, mount in enumerate(gateway.mounts):
        where = f"gateway.mounts[{index}]"
        if not PATH.fullmatch(mount.path):
            raise ConfigError(f"{where}.path = {shown(mount.path)}: expected a path such as /pages")
        for taken in ("/admin", "/v1/models", *gateway.paths):
            if f"{mount.path}/".startswith(f"{taken}/") or taken.startswith(f"{mount.path}/"):
                raise ConfigError(f"{where}.path = {shown(mount.path)}: {taken} is served already")
        if mount.path in [other.path for other in gateway.mounts[:index]]:
            raise ConfigError(f"{where}.path = {shown(mount.path)}: it is there already")


def _check_unique(gateway: GatewayConfig, option: str, *keys: str) -> None:
    """Refuse an option with two tables that have the same values of the keys; the first key is named."""
    values = [[getattr(each, key) for key in keys] for each in getattr(gateway, option)]
    for index, value in enumerate(values):
        if value in values[:index]:
            raise ConfigError(f"gateway.{option}[{index}].{keys[0]}: {value[0]!r} is there already")


def _check_workers(workers: Sequence[StaticWorker]) -> None:
    fleet = Registry()
    for index, static in enumerate(workers):
        where = f"gateway.workers[{index}]"
        try:
            worker = static.worker()
        except Unusable as error:
            raise _unusable(where, static, error) from None
        try:
            fleet.add(worker)
        except InvalidReport as error:
            raise ConfigError(f"{where}: {error}") from None


def _check_source(where: str, source: SourceOptions) -> None:
    try:
        source.check()
        # Whatever it finds must be usable, as far as its table decides that.
        source.found("any", "host:1")
    except Unusable as error:
        raise _unusable(where, source, error) from None


def _unusable(where: str, engine: EngineOptions, error: Unusable) -> ConfigError:
    return ConfigError(f"{where}.{error.key} = {shown(getattr(engine, error.key))}: {error}")


def _check_routes(routes: Sequence[Route], acceptors: Collection[str]) -> None:
    try:
        RouteTable.validate(routes)
        servable(routes, acceptors)
    except InvalidRoutes as error:
        raise ConfigError(f"gateway.{error.message}") from None
