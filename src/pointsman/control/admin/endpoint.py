"""One declaration per endpoint: its signature, from which route, OpenAPI document and reference page are made.

    @endpoint("POST", "/admin/v1/models/{model}:drain", status=202, errors=(NotFound,))
    async def drain_model(call: Call, model: str, body: Body[DrainRequest]) -> ModelState:
        \"\"\"Stop routing to every worker of a model.\"\"\"

A parameter that stands in the path is a part of it. `query` is a Struct with a field for every query parameter, and
`body` is a `Body` of the Struct that it must be. Any other one is a request header: `if_match` is `If-Match`. What is
returned is the answer, or an `Answer` where its status or a header depends. The docstring is what people read of it.

What it does not do: know what is asked for (see the modules beside it), or who may ask (see `admin.guard`).
"""

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pointsman.control.admin.parts import AdminParts
from pointsman.control.admin.shapes import Error, ErrorObject
from pointsman.errors import BadRequest, BodyTooLarge, GatewayError, InvalidKey, NotFound

__all__ = ["MAX_BODY", "Answer", "Body", "Call", "Endpoint", "Place", "endpoint", "error_response"]

MAX_BODY = 4 << 20
"""The longest body of an admin request, in bytes."""

JSON = "application/json"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """What every endpoint gets first: the parts of the gateway, and the id of the request that it answers."""

    parts: AdminParts
    request_id: str


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """An answer whose status is not the usual one, or that carries headers."""

    value: T
    status: int
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Body(Generic[T]):
    """A request body that is read when the endpoint asks for it: some things are judged before it.

    `data` are the bytes that came, `shape` is what they must be, and `malformed` is the `param` of the refusal of
    what is no JSON at all.
    """

    data: bytes
    shape: type[T]
    malformed: str | None = None

    def read(self) -> T:
        """Return the body, strictly as declared; fields that nobody declared are ignored.

        Raises `BadRequest`, with the field in `param`.
        """
        try:
            return msgspec.json.decode(self.data, type=self.shape)
        except msgspec.ValidationError as error:
            raise _refused(error, self.shape) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadRequest(
                f"the request body is not valid JSON: {error}", param=self.malformed
            ) from None
        except RecursionError:
            raise BadRequest(
                "the request body is nested too deeply", param=self.malformed
            ) from None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path.

    `statuses` are those of a good answer, the usual one first; `answer` is its type, None for no content; `errors` are
    the refusals that it can raise itself; `answer_headers` are names of response headers and what they say.
    """

    method: str
    path: str
    does: Callable[..., Awaitable[Any]]
    statuses: tuple[int, ...]
    errors: tuple[type[GatewayError], ...]
    answer_headers: Mapping[str, str]
    malformed: str | None
    path_names: tuple[str, ...]
    header_names: Mapping[str, Any]
    query: type[msgspec.Struct] | None
    body: type[msgspec.Struct] | None
    answer: Any

    @property
    def name(self) -> str:
        """The name of its function."""
        return self.does.__name__

    @property
    def summary(self) -> str:
        """The first line of its docstring, without the full stop."""
        return inspect.cleandoc(self.does.__doc__ or "").partition("\n")[0].rstrip(".")

    @property
    def description(self) -> str:
        """The rest of its docstring."""
        return inspect.cleandoc(self.does.__doc__ or "").partition("\n")[2].strip()

    async def respond(self, parts: AdminParts, request: Request) -> Response:
        """Read the request, do what it asks for, and return the response. Raises `GatewayError`."""
        given: dict[str, Any] = dict(request.path_params)
        if not all(given.values()):
            raise NotFound("a name is missing in the path")
        for name in self.header_names:
            lines = request.headers.getlist(name.replace("_", "-"))
            given[name] = ", ".join(lines) if lines else None
        if self.query is not None:
            given["query"] = _query(request, self.query)
        if self.body is not None:
            given["body"] = Body(await _read(request), self.body, self.malformed)
        call = Call(parts, request.scope["state"].get("request_id", ""))
        value = await self.does(call, **given)
        if not isinstance(value, Answer):
            value = Answer(value, self.statuses[0], {})
        if self.answer is None:
            return Response(status_code=value.status, headers=value.headers)
        return _json(value.value, value.status, value.headers)


def endpoint(
    method: str,
    path: str,
    *,
    status: int | tuple[int, ...] = 200,
    errors: tuple[type[GatewayError], ...] = (),
    headers: Mapping[str, str] | None = None,
    malformed: str | None = None,
) -> Callable[[Callable[..., Awaitable[Any]]], Endpoint]:
    """Declare an endpoint: what its function's signature cannot say.

    `headers` are those of its answer; `malformed` is the `param` of the refusal of a body that is no JSON.
    """

    def declare(does: Callable[..., Awaitable[Any]]) -> Endpoint:
        hints = get_type_hints(does, include_extras=True)
        answer = hints.pop("return")
        if get_origin(answer) is Answer:
            (answer,) = get_args(answer)
        hints.pop("call")
        path_names = tuple(re.findall(r"{(\w+)}", path))
        for name in path_names:
            hints.pop(name)
        query = hints.pop("query", None)
        body = get_args(hints.pop("body"))[0] if "body" in hints else None
        return Endpoint(
            method,
            path,
            does,
            statuses=(status,) if isinstance(status, int) else status,
            errors=errors,
            answer_headers=headers or {},
            malformed=malformed,
            path_names=path_names,
            header_names=hints,
            query=query,
            body=body,
            answer=None if answer is type(None) else answer,
        )

    return declare


class Place:
    """The ASGI application of one path: one endpoint for each method."""

    def __init__(self, parts: AdminParts, endpoints: Mapping[str, Endpoint]) -> None:
        self._parts = parts
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whose method is among those of the path."""
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        response = await self._endpoints[method].respond(self._parts, Request(scope, receive))
        await response(scope, receive, send)


def error_response(error: GatewayError, headers: Mapping[str, str] | None = None) -> Response:
    """Return OpenAI's error object as a response, with the headers that the error asks for."""
    lines = dict(headers or {})
    if error.retry_after is not None:
        lines["retry-after"] = str(error.retry_after)
    if isinstance(error, InvalidKey):
        lines["www-authenticate"] = "Bearer"
    shown = ErrorObject(error.message, error.type, error.param, error.code)
    return _json(Error(shown), error.status, lines)


def _json(value: object, status: int, headers: Mapping[str, str]) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type=JSON)


async def _read(request: Request) -> bytes:
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > MAX_BODY:
                raise BodyTooLarge(f"the request body is over {MAX_BODY} bytes")
            parts.append(part)
    except ClientDisconnect:
        raise BadRequest("the request body ended early") from None
    return b"".join(parts)


def _query(request: Request, shape: type[msgspec.Struct]) -> msgspec.Struct:
    given: dict[str, str | list[str]] = {}
    for field in msgspec.structs.fields(shape):
        values = request.query_params.getlist(field.encode_name)
        if get_origin(_plain(field.type)) is tuple:
            given[field.encode_name] = values
        elif len(values) > 1:
            raise BadRequest(f"`{field.encode_name}` is there twice", param=field.encode_name)
        elif values:
            given[field.encode_name] = values[0]
    try:
        return msgspec.convert(given, shape, strict=False)
    except msgspec.ValidationError as error:
        raise _refused(error, shape) from None


def _plain(hint: Any) -> Any:
    """Return a type without what is said about it."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _refused(error: msgspec.ValidationError, shape: type[Any]) -> BadRequest:
    # msgspec writes "Expected `int`, got `str` - at `$.limit`"; of a field that is missing, the object's place.
    text, _, place = str(error).partition(" - at `")
    found = re.search(r"required field `(.*)`", text) or re.match(r"\$\.(\w+)", place)
    if found:
        return BadRequest(f"`{found[1]}`: {text}", param=found[1])
    # What is no object lacks every field; where only one is needed, that one can be named.
    required = [each.encode_name for each in msgspec.structs.fields(shape) if each.required]
    param = required[0] if len(required) == 1 else None
    return BadRequest(f"the request body: {text}", param=param)
