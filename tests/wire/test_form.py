"""Forms as clients send them: what is read, what is refused, and that nothing but the model ever changes."""

import pytest

from pointsman.errors import BadRequest
from pointsman.wire.form import boundary_of, parse_form, with_model_at

PATH = "/v1/audio/transcriptions"
DISPOSITION = b'Content-Disposition: form-data; name="%b"\r\n'


def part(name: bytes, value: bytes, more: bytes = b"") -> bytes:
    return b"--b\r\n" + DISPOSITION % name + more + b"\r\n" + value + b"\r\n"


def form(*parts: bytes, end: bytes = b"--b--\r\n") -> bytes:
    return b"".join(parts) + end


AUDIO = (
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a; name=\\"model\\".wav"\r\n'
    b"Content-Type: audio/wav\r\n\r\nRIFF\x00\xff\r\n--bX\r\n--b-\r\n-- b\n--b\n\r\n"
)
MODEL = part(b"model", b"whisper")


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        (b"multipart/form-data; boundary=b", b"b"),
        (b'Multipart/Form-Data;charset=utf-8;BOUNDARY="a b;c"', b"a b;c"),
        (b'multipart/form-data; boundary="a\\"b"', b'a"b'),
        (b"application/json", None),
        (b"multipart/mixed; boundary=b", None),
    ],
)
def test_the_boundary_is_that_of_the_content_type(
    content_type: bytes, boundary: bytes | None
) -> None:
    assert boundary_of(content_type) == boundary


@pytest.mark.parametrize(
    "content_type",
    [
        b"multipart/form-data",
        b"multipart/form-data; boundary=",
        b'multipart/form-data; boundary=""',
        b"multipart/form-data; boundary=a; boundary=b",
        b"multipart/form-data; boundary=" + b"a" * 71,
        b'multipart/form-data; boundary="a',
        b'multipart/form-data; boundary="a\nb"',
    ],
)
def test_a_form_without_one_boundary_is_refused(content_type: bytes) -> None:
    with pytest.raises(BadRequest):
        boundary_of(content_type)


@pytest.mark.parametrize(
    "body",
    [
        form(AUDIO, MODEL),
        form(MODEL, AUDIO),
        form(MODEL, AUDIO, end=b"--b--"),
        form(MODEL, AUDIO, end=b"--b--\r\nan epilogue with\r\n--b\r\nnothing in it"),
        b"a preamble\r\n" + form(AUDIO, MODEL),
        form(AUDIO, MODEL.replace(b'"model"', b"model")),
        form(AUDIO, MODEL.replace(b'name="model"', b'name="mod\\el"')),
        form(AUDIO, MODEL.replace(b"Content-Disposition: form-data;", b"content-disposition:Form-Data ; ")),
        form(AUDIO, part(b"model", b"whisper", b"Content-Type: text/plain; charset=utf-8\r\n")),
        form(AUDIO, part(b"model", b"whisper", b"Content-Transfer-Encoding: 8bit\r\n")),
        form(b"--b\r\n\r\nwithout headers\r\n", MODEL),
    ],
)  # fmt: skip
def test_the_model_is_found_and_replaced(body: bytes) -> None:
    request = parse_form(body, b"b", "r1", PATH)
    assert (request.model, request.stream, request.path) == ("whisper", False, PATH)
    assert request.prefix_key == b""
    assert request.model_at is not None
    assert with_model_at(body, request.model_at, "grün") == body.replace(
        b"whisper", "grün".encode()
    )


@pytest.mark.parametrize(
    ("value", "stream"),
    [(b"true", True), (b"True", True), (b"1", True), (b"false", False), (b"", False)],
)
def test_stream_is_read(value: bytes, stream: bool) -> None:
    request = parse_form(form(part(b"stream", value), MODEL), b"b", "r1", PATH)
    assert request.stream is stream


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (form(AUDIO), "`model` is missing"),
        (form(part(b"model", b"")), "`model` is missing"),
        (form(MODEL, MODEL), "must stand in the request once"),
        (form(part(b"model", b"x" * 257)), "more than 256"),
        (form(part(b"model", b"\xff")), "not UTF-8"),
        (form(part(b"model", b"bW9kZWw=", b"Content-Transfer-Encoding: base64\r\n")), "plain field"),
        (form(MODEL.replace(b'"model"', b'"model"; filename="m"')), "plain field"),
        (form(MODEL.replace(b'"model"', b"\"model\"; filename*=utf-8''m")), "plain field"),
    ],
)  # fmt: skip
def test_a_model_that_is_none_is_the_fault_of_that_field(body: bytes, said: str) -> None:
    with pytest.raises(BadRequest, match=said) as refused:
        parse_form(body, b"b", "r1", PATH)
    assert refused.value.param == "model"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"--b",
        b"--b--",
        form(MODEL, end=b""),
        form(MODEL, end=b"--b"),
        form(MODEL).replace(b"\r\n", b"\n"),
        form(MODEL.replace(b"\r\n\r\n", b"\r\n")),
        form(MODEL.replace(b"--b\r\n", b"--b \r\n")),
        form(MODEL.replace(b'name="model"', b'name="x"; name="model"')),
        form(MODEL.replace(b'name="model"', b"name*=utf-8''model")),
        form(MODEL.replace(b'name="model"', b'name="model')),
        form(MODEL.replace(b'name="model"', b"filename=x")),
        form(MODEL.replace(b"form-data", b"attachment")),
        form(part(b"x", b"", DISPOSITION % b"model"), MODEL),
        form(part(b"x", b"", b"X: a\r\n folded\r\n"), MODEL),
        form(part(b"x", b"", b"no colon\r\n"), MODEL),
        form(part(b"x", b"", b"X: a\nY: b\r\n"), MODEL),
        b"--b\r\n" + form(MODEL),
        form(*[part(b"x", b"")] * 1000, MODEL),
        form(part(b"x", b"\r\n--bX" * 1001), MODEL),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_form(body, b"b", "r1", PATH)
    assert refused.value.status == 400


def test_a_form_ends_at_its_last_delimiter() -> None:
    with pytest.raises(BadRequest, match="missing"):
        parse_form(b"--b--\r\n" + form(MODEL), b"b", "r1", PATH)


def test_the_headers_of_a_form_are_limited_together() -> None:
    """They are what takes long: megabytes of semicolons would keep everybody else waiting."""
    long = b"X: " + b";" * (1 << 16) + b"\r\n"
    assert parse_form(form(part(b"model", b"w", long), AUDIO), b"b", "r1", PATH).model == "w"
    halves = [part(b"prompt", b"p", long), part(b"model", b"w", long)]
    with pytest.raises(BadRequest, match="headers of the form have more than 131072 bytes"):
        parse_form(form(*halves, AUDIO), b"b", "r1", PATH)
    with pytest.raises(BadRequest, match="headers of the form have more than"):
        parse_form(form(part(b"model", b"w", b"X: y\r\n" * (1 << 15))), b"b", "r1", PATH)
