"""A user's own endpoints: ASGI applications, named in the configuration and imported when the gateway starts.

It imports and says what is wrong. Where the application is served, and whom it lets in, is the data plane's business.
"""

import importlib
import re
from collections.abc import Awaitable, Callable, MutableMapping
from operator import attrgetter
from typing import Any, Protocol, TypeAlias

__all__ = ["Application", "MountError", "Mounted", "load_mount"]

Message: TypeAlias = MutableMapping[str, Any]
Application: TypeAlias = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]
"""What ASGI calls an application."""

TARGET = re.compile(r"(\w+(?:\.\w+)*):(\w+(?:\.\w+)*)")


class MountError(Exception):
    """A mount that cannot be served; the text names it, for the person who configured it."""


class Mounted(Protocol):
    """What is read of a mount's configuration."""

    @property
    def path(self) -> str:
        """The prefix of its paths."""

    @property
    def app(self) -> str:
        """Where the application is: `package.module:name`."""


def load_mount(mount: Mounted) -> Application:
    """Import the application of a mount; `name` may have dots, for an attribute of something.

    The module must be where Python finds it: installed, or below a folder of `PYTHONPATH`.

    Raises `MountError` for a name of another form, a module or name that is not there, a module that fails when it is
    imported, and for something that cannot be called.
    """
    target = TARGET.fullmatch(mount.app)
    if target is None:
        raise _refusal(mount, "expected package.module:name")
    module_name, name = target.groups()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise _refusal(
            mount, f"no module {error.name!r}; is it installed, or in PYTHONPATH?"
        ) from error
    except Exception as error:
        raise _refusal(
            mount, f"importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    try:
        application: Application = attrgetter(name)(module)
    except AttributeError as error:
        raise _refusal(mount, f"{module_name} has no {name!r}") from error
    if not callable(application):
        raise _refusal(mount, f"{name!r} is {type(application).__name__}, no ASGI application")
    return application


def _refusal(mount: Mounted, why: str) -> MountError:
    return MountError(f"mount {mount.path} ({mount.app}): {why}")
