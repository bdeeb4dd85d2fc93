"""Forms: whatever stands in the other parts, the model is found, and replacing it touches nothing else."""

from hypothesis import assume, given
from hypothesis import strategies as st

from pointsman.wire.form import boundary_of, parse_form, with_model_at

BOUNDARIES = st.text(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789'()+_,-./:=? ",
    min_size=1,
    max_size=70,
).filter(lambda boundary: not boundary.endswith(" "))
NAMES = st.text(st.characters(exclude_characters='"\\\r\n', exclude_categories=["Cs", "Cc"]))
MODELS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=40)


@st.composite
def contents(draw: st.DrawFn, boundary: bytes) -> bytes:
    """Any bytes, among them pieces of the delimiter, but no delimiter."""
    whole = b"\r\n--" + boundary
    near = [b"\r\n", b"--", boundary, b"\n--" + boundary, whole[:-1], whole + b"x"]
    pieces = st.one_of(st.binary(max_size=20), st.sampled_from(near))
    content = b"".join(draw(st.lists(pieces, max_size=12)))
    # The line end before it is that of the headers, and the delimiter behind it the first one there is.
    text = b"\r\n" + content + whole + b"\r\n"
    found = [text.find(whole + end) for end in (b"\r\n", b"--", b" ", b"\t")]
    assume(min(at for at in found if at >= 0) == len(content) + 2)
    return content


@given(st.data(), BOUNDARIES, MODELS, MODELS)
def test_the_model_is_found_among_any_parts(
    data: st.DataObject, boundary: str, model: str, served: str
) -> None:
    delimiter = b"--" + boundary.encode()
    names = data.draw(st.lists(NAMES.filter(lambda name: name != "model"), max_size=4))
    parts = [
        b'Content-Disposition: form-data; name="%b"; filename="%b"\r\n'
        b"Content-Type: application/octet-stream\r\n\r\n%b"
        % (name.encode(), name.encode(), data.draw(contents(boundary.encode())))
        for name in names
    ]

    def whole(value: str) -> bytes:
        field = b'Content-Disposition: form-data; name="model"\r\n\r\n' + value.encode()
        listed = [*parts[:place], field, *parts[place:]]
        return b"".join(delimiter + b"\r\n" + each + b"\r\n" for each in listed) + delimiter + b"--"

    place = data.draw(st.integers(0, len(parts)))
    read = boundary_of(b'multipart/form-data; boundary="%b"' % boundary.encode())
    assert read == boundary.encode()
    body = whole(model)
    request = parse_form(body, read, "r1", "/v1/audio/transcriptions")
    assert request.model == model
    assert request.model_at is not None
    assert with_model_at(body, request.model_at, served) == whole(served)
