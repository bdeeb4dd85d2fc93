"""The gateway itself: what it counted, how it is configured, and reading the configuration again."""

from pointsman.control.admin.endpoint import Call, endpoint
from pointsman.control.admin.shapes import Stats
from pointsman.control.reload import Configuration
from pointsman.errors import BadRequest

__all__ = ["get_config", "get_stats", "reload_config"]


@endpoint("GET", "/admin/v1/stats")
async def get_stats(call: Call) -> Stats:
    """Show what was counted since the start.

    The difference of two answers is a rate; for alerts and graphs there is `/metrics` on the health port.
    """
    return call.parts.stats()


@endpoint("GET", "/admin/v1/config")
async def get_config(call: Call) -> Configuration:
    """Show the configuration in force, and what became of the last reload.

    There are no secrets in it: the pepper and the keys stand elsewhere.
    """
    return call.parts.configuration()


@endpoint("POST", "/admin/v1/config:reload", errors=(BadRequest,))
async def reload_config(call: Call) -> Configuration:
    """Read the configuration again.

    All of it takes effect or nothing: 400 says what is wrong with it. A body is not needed. `last_reload` names the
    options that changed, and those that wait for a restart.
    """
    reload = await call.parts.reload()
    if not reload.ok:
        raise BadRequest(reload.message)
    return call.parts.configuration()
