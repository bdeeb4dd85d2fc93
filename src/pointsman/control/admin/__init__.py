"""The admin API: operators see and change a running gateway over HTTP.

`admin_app` makes the application; `AdminParts` is what it works on. To add an endpoint, write one function in the
module of its subject, declare it with `endpoint`, and name it in `api.ENDPOINTS`: the route, the OpenAPI document and
the reference page follow.

It is part of the control plane: nothing here runs for an inference request.
"""

from pointsman.control.admin.api import admin_app, openapi
from pointsman.control.admin.parts import AdminParts
from pointsman.control.admin.reference import reference
from pointsman.control.admin.shapes import Stats

__all__ = ["AdminParts", "Stats", "admin_app", "openapi", "reference"]
