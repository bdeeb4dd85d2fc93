"""Walks a canary of one route from its first share to all requests, with nothing but the admin API and its ETags.

    POINTSMAN_KEY=... python canary_rollout.py --route smol --canary smol-v4 --shares 0.1,0.5,1 --pause 60

Each step reads the route table, changes the `backends` of that one route, and puts the table back with If-Match. Where
somebody else changed the table meanwhile, the step is done again on theirs. With `--check` a command is run after each
pause, and the route is put back as it was if the command fails.

A request id keeps its backend while the canary grows, until the canary takes its share of the draw: the canary is the
last of the backends, so its share [1 - w, 1) only grows downwards. Needs Python 3.11 and nothing else.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

TRIES = 5
TIMEOUT_S = 10

Route = dict[str, Any]


class RolloutError(Exception):
    """Why the rollout cannot go on, for people."""


class Stale(Exception):
    """Somebody else changed the table since it was read."""


class Nowhere(HTTPRedirectHandler):
    """Follows no redirect: the key is for the gateway alone."""

    def redirect_request(self, *_: object) -> None:
        """Leave the redirect as the error that it is here."""


class Admin:
    """The admin API of a gateway at `url`; `key` is an API key with the scope admin, "" for none."""

    def __init__(self, url: str, key: str = "") -> None:
        self._url = url.rstrip("/") + "/admin/v1"
        # Nor is the key for a proxy that was meant for the internet.
        self._open = build_opener(ProxyHandler({}), Nowhere).open
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def ready(self, model: str) -> bool:
        """Tell whether a live worker that does not drain serves `model`."""
        answer, _ = self._ask("GET", "/workers")
        return any(each["model"] == model and not each["draining"] for each in answer["data"])

    def routes(self) -> tuple[list[Route], str]:
        """Return all routes, and the entity tag of the table."""
        answer, etag = self._ask("GET", "/routes")
        return answer["routes"], etag

    def put_routes(self, routes: list[Route], etag: str) -> str:
        """Replace the table if its tag is still `etag`, and return the new tag. Raises `Stale` if it is not."""
        _, new = self._ask("PUT", "/routes", {"routes": routes}, {"if-match": etag})
        return new

    def _ask(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[Any, str]:
        content = None if body is None else json.dumps(body).encode()
        request = Request(
            self._url + path,
            content,
            {"content-type": "application/json", **self._headers, **(headers or {})},
            method=method,
        )
        try:
            with self._open(request, timeout=TIMEOUT_S) as response:
                etag = response.headers.get("etag", "")
                if path == "/routes" and not etag:
                    raise RolloutError("the gateway sends no ETag: a change would be a blind one")
                return json.load(response), etag
        except HTTPError as error:
            with error:
                if error.code == 412:
                    raise Stale from None
                detail = error.read().decode("utf-8", "replace")
            raise RolloutError(f"{method} {path}: {error.code} {detail}") from None
        except OSError as error:
            raise RolloutError(f"{method} {path}: {error}") from None


def with_canary(route: Route, canary: str, share: float) -> Route:
    """Return a route whose canary, a served model id, gets a `share` of (0, 1] of the requests.

    The canary comes last, the others keep their proportions. A share of 1 leaves the canary alone.

    >>> with_canary({"model": "smol"}, "smol-v4", 0.1)["backends"]
    [{'model': 'smol', 'weight': 0.9}, {'model': 'smol-v4', 'weight': 0.1}]
    """
    if not 0 < share <= 1:
        raise RolloutError(f"a share is more than 0 and at most 1, not {share:g}")
    if route.get("cascade"):
        raise RolloutError(f"{route['model']} is a cascade: it has no split")
    if share == 1:
        return {**route, "backends": [{"model": canary, "weight": 1}]}
    backends = route.get("backends") or [{"model": route["model"], "weight": 1}]
    others = [each for each in backends if each["model"] != canary]
    # The weight may be left out where it is 1.
    total = sum(each.get("weight", 1) for each in others)
    if not total:
        raise RolloutError(f"{canary} serves {route['model']} alone already")
    scaled = [
        {**each, "weight": round(each.get("weight", 1) / total * (1 - share), 9)} for each in others
    ]
    return {**route, "backends": [*scaled, {"model": canary, "weight": round(share, 9)}]}


def change(admin: Admin, model: str, edit: Callable[[Route], Route]) -> tuple[Route, str]:
    """Change one route, however often others change the table meanwhile; return the route as it was, and the new tag.

    Raises `RolloutError` when there is no such route, when the gateway refuses the table, and after 5 tries.
    """
    for _ in range(TRIES):
        routes, etag = admin.routes()
        place = next((n for n, each in enumerate(routes) if each["model"] == model), None)
        if place is None:
            raise RolloutError(f"there is no route {model}")
        before = routes[place]
        routes[place] = edit(before)
        try:
            return before, admin.put_routes(routes, etag)
        except Stale:
            continue
    raise RolloutError(f"the table was changed by others {TRIES} times in a row")


def walk(
    admin: Admin,
    model: str,
    canary: str,
    shares: Iterable[float],
    *,
    healthy: Callable[[float], bool],
    say: Callable[[str], None] = print,
) -> bool:
    """Give the canary one share after the other; tell whether it got them all.

    `healthy` is called with each share once it is in force: it waits, looks, and tells whether to go on. If not, or if
    it raises, the route is as it was before. Raises `RolloutError` where a step cannot be done.
    """
    if not admin.ready(canary):
        raise RolloutError(f"no worker serves {canary} yet")
    original: Route | None = None
    promoted = False
    try:
        for share in shares:
            before, etag = change(admin, model, partial(with_canary, canary=canary, share=share))
            original = original or before
            say(f"{canary} gets {share:g} of {model} ({etag})")
            if not healthy(share):
                say(f"{canary} is not healthy")
                return False
        promoted = True
    finally:
        if original is not None and not promoted:
            backup = original
            _, etag = change(admin, model, lambda _: backup)
            say(f"{model} is as it was ({etag})")
    return promoted


def main(arguments: list[str] | None = None) -> int:
    """Run the script; return its exit status."""
    parser = argparse.ArgumentParser(description="Walk a canary of one route.")
    parser.add_argument("--url", default=os.environ.get("POINTSMAN_URL", "http://127.0.0.1:8080"))
    parser.add_argument("--route", required=True, help="the public model id")
    parser.add_argument("--canary", required=True, help="the served model id")
    parser.add_argument("--shares", default="0.1,0.25,0.5,1", help="one after the other")
    parser.add_argument("--pause", type=float, default=60, help="seconds after each step")
    parser.add_argument("--check", help="a command that fails where the canary is not healthy")
    given = parser.parse_args(arguments)
    admin = Admin(given.url, os.environ.get("POINTSMAN_KEY", ""))

    def healthy(_share: float) -> bool:
        time.sleep(given.pause)
        return given.check is None or subprocess.call(given.check, shell=True) == 0

    try:
        shares = [float(share) for share in given.shares.split(",")]
        return 0 if walk(admin, given.route, given.canary, shares, healthy=healthy) else 1
    except (RolloutError, ValueError) as error:
        print(f"canary_rollout: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
