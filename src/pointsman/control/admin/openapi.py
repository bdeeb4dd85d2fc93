"""The OpenAPI 3.1 document of the admin API, made from the declarations of its endpoints.

What is true of every endpoint is added here once: a key is needed, a body can be too long or wrong, a gateway can fail.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from pointsman import __version__
from pointsman.control.admin.endpoint import Endpoint
from pointsman.control.admin.shapes import Error
from pointsman.errors import (
    BadRequest,
    BodyTooLarge,
    GatewayError,
    InsufficientScope,
    InternalError,
    InvalidKey,
    NotFound,
)

__all__ = ["document"]

STATUSES = {200: "OK.", 201: "It is new.", 202: "It has begun.", 204: "It is gone."}


def document(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """Return the document as plain lists and dicts."""
    endpoints = tuple(endpoints)
    named = {type_: None for each in endpoints for type_ in _types(each)}
    references, components = msgspec.json.schema_components(
        named, ref_template="#/components/schemas/{name}"
    )
    schemas = dict(zip(named, references, strict=True))
    paths: dict[str, dict[str, Any]] = defaultdict(dict)
    for each in endpoints:
        paths[each.path][each.method.lower()] = _operation(each, schemas)
    made = {
        "openapi": "3.1.0",
        "info": {
            "title": "Pointsman admin API",
            "version": __version__,
            "description": "For operators of a gateway. Every error is OpenAI's error object.",
        },
        "paths": paths,
        "components": {
            "schemas": _open(components),
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API key with the scope `admin`.",
                }
            },
        },
        "security": [{"key": []}],
    }
    # Defaults are tuples and enums until they are JSON.
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(made))
    return plain


def _errors(endpoint: Endpoint) -> list[type[GatewayError]]:
    """Return every refusal that an endpoint can answer with, by status."""
    found = {InvalidKey, InsufficientScope, InternalError, *endpoint.errors}
    if endpoint.path_names:
        found.add(NotFound)
    if endpoint.query is not None:
        found.add(BadRequest)
    if endpoint.body is not None:
        found |= {BadRequest, BodyTooLarge}
    return sorted(found, key=lambda error: (error.status, error.__name__))


def _types(endpoint: Endpoint) -> Iterator[Any]:
    yield Error
    for type_ in (endpoint.body, endpoint.answer):
        if type_ is not None:
            yield type_


def _operation(endpoint: Endpoint, schemas: dict[Any, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": endpoint.name,
        "tags": [endpoint.does.__module__.rpartition(".")[2]],
        "summary": endpoint.summary,
        "description": endpoint.description,
        "parameters": list(_parameters(endpoint)),
    }
    if endpoint.body is not None:
        operation["requestBody"] = {"required": True, "content": _content(schemas[endpoint.body])}
    operation["responses"] = _responses(endpoint, schemas)
    return operation


def _parameters(endpoint: Endpoint) -> Iterator[dict[str, Any]]:
    for name in endpoint.path_names:
        yield _parameter(name, "path", {"type": "string", "minLength": 1}, required=True)
    if endpoint.query is not None:
        (_,), components = msgspec.json.schema_components([endpoint.query])
        for name, schema in components[endpoint.query.__name__]["properties"].items():
            yield _parameter(name, "query", schema, required=False)
    for name, hint in endpoint.header_names.items():
        said = msgspec.json.schema(hint).get("description", "")
        header = "-".join(word.capitalize() for word in name.split("_"))
        schema = {"type": "string", "description": said}
        yield _parameter(header, "header", schema, required=True)


def _parameter(name: str, where: str, schema: dict[str, Any], *, required: bool) -> dict[str, Any]:
    rest = {key: value for key, value in schema.items() if key != "description"}
    said = {"description": schema["description"]} if "description" in schema else {}
    return {"name": name, "in": where, "required": required, **said, "schema": rest}


def _responses(endpoint: Endpoint, schemas: dict[Any, Any]) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status in sorted(endpoint.statuses):
        good = responses[str(status)] = {"description": STATUSES[status]}
        if endpoint.answer is not None:
            good["content"] = _content(schemas[endpoint.answer])
        if endpoint.answer_headers:
            good["headers"] = {
                name: {"description": said, "required": True, "schema": {"type": "string"}}
                for name, said in endpoint.answer_headers.items()
            }
    for error in _errors(endpoint):
        said = (error.__doc__ or "").partition("\n")[0]
        code = f" `{error.code}`" if error.code else ""
        known = responses.setdefault(
            str(error.status), {"description": "", "content": _content(schemas[Error])}
        )
        known["description"] = f"{known['description']} {said}{code}".strip()
    return responses


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _open(schema: Any) -> Any:
    """Return a schema without the refusal of further fields: an older client meets those of a newer gateway."""
    if isinstance(schema, dict):
        return {
            key: _open(value)
            for key, value in schema.items()
            if (key, value) != ("additionalProperties", False)
        }
    return schema
