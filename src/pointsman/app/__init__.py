"""The composition root: builds every object of a gateway, starts it, reloads it, drains it and stops it.

Nothing else knows all the parts.
"""

from pointsman.app.command import serve
from pointsman.app.gateway import Gateway

__all__ = ["Gateway", "serve"]
