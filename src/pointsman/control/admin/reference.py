"""The reference page of the admin API: its OpenAPI document, told in Markdown."""

import json
from collections.abc import Iterator
from typing import Any

__all__ = ["reference"]

INTRODUCTION = """\
# Admin API

Operators see and change a running gateway over HTTP, on the API port under `/admin/v1`. Made by
`pointsman admin reference`; the same as an OpenAPI 3.1 document is at `/admin/v1/openapi.json`, and `pointsman admin
openapi` prints it.

Every request needs a key with the scope `admin` (`Authorization: Bearer <key>`). A gateway without keys takes requests
from its own machine alone, and none that a web page sent: `Host` must be a loopback name, and `Origin`, where there is
one, the gateway itself.

Bodies and answers are JSON, whatever `Content-Type` says; fields that nobody knows are ignored, and a body of more
than 4 MiB is refused (413). Names in paths may contain slashes, and everything else percent-encoded; `{model}:drain`
takes what stands before the last `:drain`. `HEAD` works where `GET` does. An error is OpenAI's error object:

```json
{"error": {"message": "...", "type": "invalid_request_error", "param": "deadline_s", "code": null}}
```

Every path can answer 401 (`invalid_api_key`), 403 (`insufficient_scope`) and 500 (`internal_error`); a path that does
not exist answers 404 (`not_found`), and one that has other methods 405 with `Allow`. What else can go wrong is said
below.

```sh
curl -H "Authorization: Bearer $KEY" http://127.0.0.1:8080/admin/v1/workers
```
"""

EVERYWHERE = ("401", "403", "413", "500")
"""Statuses that the introduction tells of once."""

Schema = dict[str, Any]


def reference(document: dict[str, Any]) -> str:
    """Return the page for an OpenAPI document of this API."""
    lines = [INTRODUCTION]
    tag = ""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if operation["tags"][0] != tag:
                tag = operation["tags"][0]
                lines.append(f"## Endpoints: {tag}\n")
            lines += _operation(f"{method.upper()} {path}", operation)
    lines.append("## Shapes\n")
    for name, schema in document["components"]["schemas"].items():
        lines += _shape(name, schema)
    return "\n".join(lines).rstrip() + "\n"


def _operation(title: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"### {title}\n"
    yield f"{operation['summary']}.\n"
    if operation["description"]:
        yield f"{operation['description']}\n"
    if operation["parameters"]:
        yield "| parameter | in | type | meaning |\n|---|---|---|---|"
        for each in operation["parameters"]:
            kind = _type(each["schema"])
            yield f"| `{each['name']}` | {each['in']} | {kind} | {each.get('description', '')} |"
        yield ""
    if "requestBody" in operation:
        yield f"Body: {_content(operation['requestBody'])}.\n"
    for status, response in operation["responses"].items():
        if status not in EVERYWHERE:
            yield f"- **{status}** {_response(status, response)}"
    yield ""


def _response(status: str, response: dict[str, Any]) -> str:
    said: str = response["description"]
    if status.startswith("2") and "content" in response:
        said += f" {_content(response)}."
    for name, header in response.get("headers", {}).items():
        said += f" `{name}`: {header['description']}"
    return said


def _shape(name: str, schema: Schema) -> Iterator[str]:
    yield f"### {name}\n"
    yield f"{schema.get('description', '')}\n".lstrip("\n")
    if "enum" in schema:
        yield f"One of {_type(schema)}.\n"
        return
    yield "| field | type | meaning |\n|---|---|---|"
    required = schema.get("required", [])
    for field, value in schema["properties"].items():
        default = f" Default: `{json.dumps(value['default'])}`." if "default" in value else ""
        optional = " May be missing." if not default and field not in required else ""
        said = f"{value.get('description', '')}{default}{optional}".strip()
        yield f"| `{field}` | {_type(value)} | {said} |"
    yield ""


def _content(part: dict[str, Any]) -> str:
    return _type(part["content"]["application/json"]["schema"])


def _type(schema: Schema) -> str:
    """Return a schema in a few words, with a link where it is a shape of its own."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind: str = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema['items'])}" if "items" in schema else "list"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])}"
    return kind + _limits(schema)


def _limits(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f" {low}..{high}"
    if low is not None:
        return f" from {low}"
    if "maxLength" in schema:
        return f" of {schema.get('minLength', 0)}..{schema['maxLength']} characters"
    return ""
