"""Public model ids and what serves them: aliases, canaries, cascades, targets, and the table of it all.

A table is immutable. A change is a new table with the next epoch, put in place by `Router.adopt`. `RouteTable`
refuses a table that breaks a rule and says where, so a table that exists is a good one.

What it does not do: know which workers are alive (see `pointsman.domain.router`).
"""

import math
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import pairwise

import msgspec

from pointsman.domain.cascade import check_accept_if
from pointsman.domain.ring import hash64, unit
from pointsman.errors import BadRule, InvalidRoutes

__all__ = [
    "TARGETS",
    "Backend",
    "Route",
    "RouteTable",
    "Step",
    "StreamHold",
    "pick_backend",
    "routes_from_config",
    "routes_from_json",
]

TARGETS = ("unified", "disaggregated")
"""How a route can be served: by one worker, or by a prefill and a decode worker."""

MAX_NAME = 256
"""The longest model id or alias, in characters."""

WEIGHT_SUMS = (0.999, 1.001)
"""What the weights of a route may sum to: canary tools round each weight."""


class Backend(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One served model id of a weighted split. Its weight is always written: tools that move it read it first."""

    model: str
    weight: float = 1.0


class Step(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One model of a cascade; `accept_if` is the rule for keeping its answer, empty on the last step.

    `acceptor` is the name of the learned acceptor that a rule over `score` asks.
    """

    model: str
    accept_if: str = ""
    acceptor: str = ""


class StreamHold(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How long a cascade holds the stream of a step back before it decides: so many tokens, or so many seconds."""

    tokens: int = 32
    seconds: float = 1.0


class Route(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What serves a public model id.

    `targets` is an order of preference. `backends` is a weighted split drawn by request id. `cascade` is asked in
    order, the last step being final; streams go to the last step at once, unless `stream_hold` lets the steps before it
    try; `shadow` is the fraction of a cascade's requests for which the last model is asked too, to compare.
    `default_max_tokens` is for requests without a limit of their own; a prompt shorter than `disagg_min_tokens` is not
    handed off, None leaves that to the gateway's option of this name.
    """

    model: str
    aliases: tuple[str, ...] = ()
    targets: tuple[str, ...] = ("unified",)
    backends: tuple[Backend, ...] = ()
    cascade: tuple[Step, ...] = ()
    default_max_tokens: int | None = None
    disagg_min_tokens: int | None = None
    stream_hold: StreamHold | None = None
    shadow: float = 0.0

    @property
    def plain(self) -> bool:
        """Whether a request needs one worker and nothing else."""
        return not self.cascade and "disaggregated" not in self.targets


class RouteTable:
    """The routes in force, and their epoch.

    Raises `InvalidRoutes` for routes that break a rule, see `validate`.
    """

    __slots__ = ("_by_name", "_named", "epoch", "hands_off", "routes")

    def __init__(self, routes: Sequence[Route] = (), epoch: int = 1) -> None:
        self.validate(routes)
        self.routes = tuple(routes)
        self.epoch = epoch
        self.hands_off = any("disaggregated" in route.targets for route in routes)
        """Whether any route has prefill and decode workers for a target."""
        self._by_name = {n: route for route in routes for n in (route.model, *route.aliases)}
        backends = {backend.model for route in routes for backend in route.backends}
        steps = {step.model for route in routes for step in route.cascade}
        self._named = backends | steps | self._by_name.keys()

    @property
    def etag(self) -> str:
        """The strong entity tag of this version, quotes included.

        >>> RouteTable(epoch=7).etag
        '"routes-7"'
        """
        return f'"routes-{self.epoch}"'

    def lookup(self, name: str) -> Route | None:
        """Return the route with this model id or alias.

        >>> RouteTable([Route("smol-v3", aliases=("smol",))]).lookup("smol").model
        'smol-v3'
        """
        return self._by_name.get(name)

    def served(self, name: str) -> tuple[str, ...]:
        """Return the ids under which workers may serve a model id or alias; a name without a route is its own.

        >>> RouteTable([Route("smol", aliases=("s",), backends=(Backend("smol-v3"),))]).served("s")
        ('smol-v3',)
        """
        route = self._by_name.get(name)
        if route is None:
            return (name,)
        parts = route.backends or route.cascade
        return tuple(dict.fromkeys(part.model for part in parts)) or (route.model,)

    def names(self, model: str) -> bool:
        """Tell whether the table mentions `model` anywhere: as an id, an alias, a backend or a cascade step.

        >>> RouteTable([Route("smol", backends=(Backend("smol-v3"),))]).names("smol-v3")
        True
        """
        return model in self._named

    def models(self) -> list[str]:
        """Return the public model ids, without aliases, sorted.

        >>> RouteTable([Route("b"), Route("a", aliases=("c",))]).models()
        ['a', 'b']
        """
        return sorted(route.model for route in self.routes)

    @staticmethod
    def validate(routes: Sequence[Route]) -> None:
        """Raise `InvalidRoutes` at the first rule that `routes` break, with the place in `param`.

        Ids and aliases are non-empty and unique over the whole table; targets are known and not repeated; weights are
        finite, not negative, and sum to 1 within 0.001; a cascade has two steps or more, each but the last with a rule
        that parses, the last without; `shadow` is 0 to 1 and, like `stream_hold`, for cascades only;
        `default_max_tokens` is at least 1.

        >>> RouteTable.validate([Route("smol", targets=("unifed",))])
        Traceback (most recent call last):
        pointsman.errors.InvalidRoutes: routes[0].targets[0]: unknown target 'unifed', did you mean 'unified'?
        """
        owners: dict[str, str] = {}
        for index, route in enumerate(routes):
            place = f"routes[{index}]"
            for where, name in _names_of(route, place):
                _check_name(where, name)
                if name in owners:
                    _refuse(where, f"{name!r} is already the name of {owners[name]}")
                owners[name] = where
            _check_targets(route, place)
            _check_backends(route, place)
            _check_cascade(route, place)
            if route.default_max_tokens is not None and route.default_max_tokens < 1:
                _refuse(f"{place}.default_max_tokens", "must be at least 1")
            if route.disagg_min_tokens is not None and route.disagg_min_tokens < 0:
                _refuse(f"{place}.disagg_min_tokens", "must be 0 or more")


def pick_backend(route: Route, request_id: str) -> str:
    """Return the served model id for a request: a weighted draw that depends on the request id alone.

    x = unit(hash64(request id)) * total weight; the first backend whose running sum exceeds x. Without backends it is
    the route's own model. Source: specification, section 2.4.

    >>> canary = Route("smol", backends=(Backend("smol-v3", 0.9), Backend("smol-v4", 0.1)))
    >>> pick_backend(canary, "req-1")
    'smol-v3'
    """
    backends = route.backends
    if not backends:
        return route.model
    if len(backends) == 1:
        return backends[0].model
    total = 0.0
    for backend in backends:
        total += backend.weight
    x = unit(hash64(request_id.encode("utf-8", "replace"))) * total
    running = 0.0
    for backend in backends:
        running += backend.weight
        if x < running:
            return backend.model
    return backends[-1].model


def routes_from_config(value: object) -> tuple[Route, ...]:
    """Read routes from plain lists and dicts; a key that does not exist is an error.

    Raises `InvalidRoutes`, with the place in `param`. The rules of a table are checked by `RouteTable`.

    >>> routes_from_config([{"model": "smol", "aliases": ["s"]}])[0].aliases
    ('s',)
    """
    try:
        return msgspec.convert(value, tuple[Route, ...])
    except msgspec.ValidationError as error:
        raise _misshapen(error) from None


def routes_from_json(value: object) -> tuple[Route, ...]:
    """Read routes from plain lists and dicts, ignoring keys that do not exist, as the admin API promises.

    Raises `InvalidRoutes`, with the place in `param`. The rules of a table are checked by `RouteTable`.

    >>> routes_from_json([{"model": "smol", "colour": "red"}])[0].model
    'smol'
    """
    return routes_from_config(_known_only(value, Route))


_PARTS: dict[str, type[msgspec.Struct]] = {
    "backends": Backend,
    "cascade": Step,
    "stream_hold": StreamHold,
}


def _known_only(value: object, shape: type[msgspec.Struct]) -> object:
    if isinstance(value, list):
        return [_known_only(item, shape) for item in value]
    if not isinstance(value, dict):
        return value
    parts = _PARTS if shape is Route else {}
    return {
        key: _known_only(item, parts[key]) if key in parts else item
        for key, item in value.items()
        if key in shape.__struct_fields__
    }


def _misshapen(error: msgspec.ValidationError) -> InvalidRoutes:
    # msgspec writes "Expected `str`, got `int` - at `$[0].backends[1].model`".
    text, _, path = str(error).partition(" - at `")
    place = "routes" + path.rstrip("`").removeprefix("$")
    unknown = re.search(r"unknown field `(.*)`", text)
    if unknown:
        part = re.search(r"\.(backends(?=\[)|cascade(?=\[)|stream_hold)", place)
        shape = _PARTS[part[1]] if part else Route
        text = f"unknown key {unknown[1]!r}{_nearest(unknown[1], shape.__struct_fields__)}"
    return InvalidRoutes(f"{place}: {text}", param=place)


def _names_of(route: Route, place: str) -> Iterator[tuple[str, str]]:
    yield f"{place}.model", route.model
    for index, alias in enumerate(route.aliases):
        yield f"{place}.aliases[{index}]", alias


def _check_name(place: str, name: str) -> None:
    if not (0 < len(name) <= MAX_NAME and name.isprintable()):
        _refuse(place, f"must be 1 to {MAX_NAME} printable characters")


def _check_targets(route: Route, place: str) -> None:
    if not route.targets:
        _refuse(f"{place}.targets", f"must name at least one of {', '.join(TARGETS)}")
    for index, target in enumerate(route.targets):
        where = f"{place}.targets[{index}]"
        if target not in TARGETS:
            _refuse(where, f"unknown target {target[:MAX_NAME]!r}{_nearest(target, TARGETS)}")
        if target in route.targets[:index]:
            _refuse(where, f"{target!r} is there already")


def _check_backends(route: Route, place: str) -> None:
    if not route.backends:
        return
    total = 0.0
    for index, backend in enumerate(route.backends):
        _check_name(f"{place}.backends[{index}].model", backend.model)
        if not (math.isfinite(backend.weight) and backend.weight >= 0):
            _refuse(f"{place}.backends[{index}].weight", "must be a number of 0 or more")
        total += backend.weight
    least, most = WEIGHT_SUMS
    if not least <= total <= most:
        _refuse(f"{place}.backends", f"weights sum to {total:.6g}, not 1")


def _check_cascade(route: Route, place: str) -> None:
    if len(route.cascade) == 1:
        _refuse(f"{place}.cascade", "one step is no cascade: use a backend, or add a step")
    for index, step in enumerate(route.cascade):
        _check_name(f"{place}.cascade[{index}].model", step.model)
    for index, (step, _) in enumerate(pairwise(route.cascade)):
        where = f"{place}.cascade[{index}].accept_if"
        if not step.accept_if:
            _refuse(where, "every step but the last needs a rule")
        try:
            # Whether there is an acceptor of that name is no matter of the table.
            check_accept_if(step.accept_if, acceptor_named=bool(step.acceptor))
        except BadRule as error:
            _refuse(where, error.message)
    if not (math.isfinite(route.shadow) and 0 <= route.shadow <= 1):
        _refuse(f"{place}.shadow", "must be 0 to 1")
    if not route.cascade and (route.shadow or route.stream_hold is not None):
        name = "shadow" if route.shadow else "stream_hold"
        _refuse(f"{place}.{name}", "is for cascades")
    hold = route.stream_hold
    if hold is not None and (hold.tokens < 1 or not 0 < hold.seconds <= 3600):
        _refuse(
            f"{place}.stream_hold", "tokens must be at least 1, seconds over 0 and at most 3600"
        )
    if route.cascade and route.cascade[-1].accept_if:
        last = len(route.cascade) - 1
        _refuse(f"{place}.cascade[{last}].accept_if", "the last step is final and takes no rule")


def _nearest(name: str, valid: Sequence[str]) -> str:
    close = get_close_matches(name, valid, n=1)
    return f", did you mean {close[0]!r}?" if close else f", valid are {', '.join(valid)}"


def _refuse(place: str, message: str) -> None:
    raise InvalidRoutes(f"{place}: {message}", param=place)
