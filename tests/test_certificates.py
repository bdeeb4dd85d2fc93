"""Files that cannot be used are refused with their option, their name and what is wrong."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from pointsman.certificates import Pem, TlsError, TlsFiles
from pointsman.testing.certificates import Authority


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a good pair (a.crt, a.key), a second one (b), their CA, and what is no certificate."""
    authority = Authority(tmp_path)
    cert, key = authority.issue("a")
    authority.issue("b")
    (tmp_path / "text").write_bytes(b"\xffno certificate")
    (tmp_path / "cut").write_bytes(Path(cert).read_bytes()[:300])
    (tmp_path / "said").write_bytes("für alle\n".encode() + Path(authority.ca).read_bytes())
    encrypted = load_pem_private_key(Path(key).read_bytes(), None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    )
    (tmp_path / "locked").write_bytes(encrypted)
    return tmp_path


def files(folder: Path, cert: str, key: str, ca: str) -> TlsFiles:
    def pem(option: str, name: str) -> Pem:
        return Pem(option, str(folder / name) if name else "")

    return TlsFiles(pem("tls_cert", cert), pem("tls_key", key), pem("tls_client_ca", ca))


@pytest.mark.parametrize(
    ("cert", "key", "ca", "option", "why"),
    [
        ("a.crt", "", "", "tls_key", "needed beside tls_cert"),
        ("", "a.key", "", "tls_key", "of no use without tls_cert"),
        ("a.crt", "b.key", "", "tls_key", "not the key of tls_cert"),
        ("a.crt", "text", "", "tls_key", "not a private key in PEM"),
        ("a.crt", "none", "", "tls_key", "No such file or directory"),
        ("a.crt", "locked", "", "tls_key", "is encrypted"),
        ("none", "a.key", "", "tls_cert", "No such file or directory"),
        (".", "a.key", "", "tls_cert", "Is a directory"),
        ("text", "a.key", "", "tls_cert", "not a certificate in PEM"),
        ("cut", "a.key", "", "tls_cert", "not a certificate in PEM"),
        ("a.key", "a.key", "", "tls_cert", "not a certificate in PEM"),
        ("a.crt", "a.key", "text", "tls_client_ca", "not a certificate in PEM"),
        ("a.crt", "a.key", "none", "tls_client_ca", "No such file or directory"),
    ],
)
@pytest.mark.parametrize("server", [True, False])
def test_what_cannot_be_used_is_named(
    folder: Path, server: bool, cert: str, key: str, ca: str, option: str, why: str
) -> None:
    with pytest.raises(TlsError) as refused:
        files(folder, cert, key, ca).check(server=server)
    name = {"tls_cert": cert, "tls_key": key, "tls_client_ca": ca}[option]
    path = str(folder / name) if name else ""
    assert refused.value.pem == Pem(option, path)
    assert str(refused.value).startswith(f'{option} = "{path}": {why}')


@pytest.mark.parametrize(
    ("cert", "key", "ca"),
    [
        ("", "", ""),
        ("a.crt", "a.key", ""),
        ("a.crt", "a.key", "ca.pem"),
        ("a.crt", "a.key", "said"),
    ],
)
def test_what_fits_is_taken(folder: Path, cert: str, key: str, ca: str) -> None:
    for server in (True, False):
        files(folder, cert, key, ca).check(server=server)
    assert bool(files(folder, cert, key, ca)) is bool(cert)


def test_a_ca_alone_is_enough_for_a_client_and_not_for_a_server(folder: Path) -> None:
    alone = files(folder, "", "", "ca.pem")
    alone.check(server=False)
    assert alone
    with pytest.raises(TlsError, match="of no use without tls_cert"):
        alone.check(server=True)
