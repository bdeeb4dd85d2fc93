"""An engine without a path against an engine without a model: recorded answers of both kinds."""

import pytest

from pointsman.wire.unserved import lacks_path

FILE = b'{"error":{"message":"File Not Found","type":"not_found_error","code":404}}'
EMBEDDINGS = (
    b'{"error":{"code":501,"message":"This server does not support embeddings. '
    b'Start it with `--embeddings`","type":"not_supported_error"}}'
)
AUDIO = (
    b'{"error":{"code":501,"message":"The current model does not support audio input.",'
    b'"type":"not_supported_error"}}'
)
POOLING = (
    b'{"error":{"message":"The model does not support Pooling API",'
    b'"type":"NotImplementedError","param":null,"code":501}}'
)
MODEL = (
    b'{"error":{"message":"The model `nobody` does not exist. Valid aliases: smollm2.",'
    b'"type":"NotFoundError","param":"model","code":404}}'
)
MESSAGES_MODEL = (
    b'{"type":"error","error":{"type":"NotFoundError",'
    b'"message":"The model `nobody` does not exist."}}'
)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        pytest.param(404, b'{"detail":"Not Found"}', id="FastAPI"),
        pytest.param(405, b'{"detail":"Method Not Allowed"}', id="FastAPI, another method"),
        pytest.param(404, FILE, id="llama.cpp"),
        pytest.param(501, EMBEDDINGS, id="llama.cpp without embeddings"),
        pytest.param(501, AUDIO, id="llama.cpp without audio"),
        pytest.param(501, POOLING, id="vLLM without pooling"),
        pytest.param(404, b"", id="nothing"),
        pytest.param(404, b"Not Found", id="a line"),
        pytest.param(404, b"404 page not found\n", id="another line"),
        pytest.param(404, b"<html><h1>404 Not Found</h1></html>", id="a page"),
        pytest.param(404, b'{"error":"Not Found"}', id="an error that is a text"),
        pytest.param(405, b"", id="nothing, another method"),
        pytest.param(501, b"Unsupported method ('POST')", id="a server of files"),
        pytest.param(404, b"[]", id="no object"),
    ],
)
def test_no_such_path(status: int, body: bytes) -> None:
    assert lacks_path(status, body)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        pytest.param(404, MODEL, id="no such model"),
        pytest.param(404, MESSAGES_MODEL, id="no such model, Messages API"),
        pytest.param(404, b'{"error":"model \'x\' not found"}', id="an error that is a text"),
        pytest.param(404, b'{"detail":"Response resp_1 not found"}', id="no such object"),
        pytest.param(404, b'{"detail":[{"loc":["body"]}]}', id="a list of faults"),
        pytest.param(404, b'{"error":{}}', id="an empty error"),
        pytest.param(404, b'{"error":' * 100_000, id="what nobody can read"),
        pytest.param(404, b"{}", id="an empty object"),
        pytest.param(501, b'{"error":{"message":"n > 1 is not implemented"}}', id="this request"),
        pytest.param(501, b'{"error":"n > 1 is not implemented"}', id="this request, a text"),
        pytest.param(400, FILE, id="another status"),
        pytest.param(500, b"", id="a failure"),
        pytest.param(200, b"", id="an answer"),
    ],
)
def test_an_answer_like_any_other(status: int, body: bytes) -> None:
    assert not lacks_path(status, body)
