"""Keys through the admin API: the text is shown once, the digest never."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pointsman.domain.keys import Principal
from pointsman.errors import InvalidKey
from pointsman.testing.admin import Operated, Operator

pytestmark = pytest.mark.anyio

PATH = "/admin/v1/keys"


@pytest.fixture
def gateway(tmp_path: Path) -> Operated:
    return Operated(tmp_path / "keys.jsonl")


@pytest.fixture
def operator(gateway: Operated) -> Operator:
    return Operator(gateway.app)


async def made(operator: Operator, **fields: Any) -> dict[str, Any]:
    response = await operator.ask("POST", PATH, {"tenant": "acme", "name": "laptop", **fields})
    assert response.status == 201, response.body
    shown: dict[str, Any] = msgspec.json.decode(response.body)
    return shown


async def test_a_key_is_made_with_the_defaults_of_the_contract(operator: Operator) -> None:
    key = await made(operator)
    assert key.pop("key").startswith(f"tl_{key['key_id']}_")
    del key["key_id"]
    assert key == {
        "tenant": "acme",
        "name": "laptop",
        "scopes": ["infer"],
        "rpm": 60,
        "tpm": 100_000,
        "priority": 0,
        "models": [],
        "created_at": 1_700_000_000,
        "expires_at": None,
        "revoked": False,
    }


async def test_a_key_is_made_as_asked_and_listed_without_its_text(
    gateway: Operated, operator: Operator
) -> None:
    asked = {
        "scopes": ["infer", "debug"],
        "rpm": 0,
        "tpm": 7,
        "priority": -100,
        "models": ["smol", "größe"],
        "expires_at": 1_800_000_000,
    }
    first = await made(operator, **asked)
    assert {name: first[name] for name in asked} == asked
    gateway.now += 1
    second = await made(operator, tenant="zeta", name="🔑", note="not ours")
    listed = (await operator.get(PATH))["data"]
    assert [key["key_id"] for key in listed] == [second["key_id"], first["key_id"]]
    assert listed[1] == {name: value for name, value in first.items() if name != "key"}
    (ours,) = (await operator.get(f"{PATH}?tenant=zeta"))["data"]
    assert ours["key_id"] == second["key_id"]
    assert (await operator.get(f"{PATH}?tenant=nobody"))["data"] == []


def admitted(gateway: Operated, text: str) -> Principal | None:
    try:
        return gateway.keyring.admit(f"Bearer {text}".encode(), gateway.now)
    except InvalidKey:
        return None


async def test_a_key_is_good_from_its_answer_on_until_it_is_revoked(
    gateway: Operated, operator: Operator
) -> None:
    key = await made(operator, scopes=["admin", "infer"], priority=7)
    principal = admitted(gateway, key["key"])
    assert principal is not None
    assert (principal.key_id, principal.tenant, principal.priority) == (key["key_id"], "acme", 7)
    gone = await operator.ask("DELETE", f"{PATH}/{key['key_id']}")
    assert (gone.status, gone.body) == (204, b"")
    assert admitted(gateway, key["key"]) is None
    assert [each["revoked"] for each in (await operator.get(PATH))["data"]] == [True]
    assert (await operator.ask("DELETE", f"{PATH}/{key['key_id']}")).status == 204


async def test_an_unknown_key_cannot_be_revoked(operator: Operator) -> None:
    unknown = await operator.ask("DELETE", f"{PATH}/nobody/at%20all")
    assert (unknown.status, unknown.error["code"]) == (404, "not_found")


async def test_no_answer_has_a_digest_and_the_file_no_secret(
    tmp_path: Path, operator: Operator
) -> None:
    response = await operator.ask("POST", PATH, {"tenant": "acme", "name": "laptop"})
    secret = msgspec.json.decode(response.body)["key"].rpartition("_")[2]
    kept = (tmp_path / "keys.jsonl").read_text()
    assert secret not in kept
    listed = await operator.ask("GET", PATH)
    digest = msgspec.json.decode(kept)["hmac"]
    assert digest.encode() not in response.body + listed.body


async def test_a_key_that_cannot_be_kept_is_not_made(tmp_path: Path, operator: Operator) -> None:
    (tmp_path / "keys.jsonl").unlink()
    (tmp_path / "keys.jsonl").mkdir()
    for method, path in (("POST", PATH), ("GET", PATH), ("DELETE", f"{PATH}/x")):
        refused = await operator.ask(method, path, {"tenant": "acme", "name": "laptop"})
        assert (refused.status, refused.error["code"]) == (503, "state_unavailable")
        assert refused.header("retry-after") == "1"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tenant": None}, "tenant"),
        ({"tenant": ""}, "tenant"),
        ({"tenant": "Acme"}, "tenant"),
        ({"tenant": "-acme"}, "tenant"),
        ({"tenant": "a\n"}, "tenant"),
        ({"tenant": "a" * 64}, "tenant"),
        ({"tenant": "größe"}, "tenant"),
        ({"name": ""}, "name"),
        ({"name": "n" * 129}, "name"),
        ({"name": 7}, "name"),
        ({"scopes": []}, "scopes"),
        ({"scopes": "infer"}, "scopes"),
        ({"scopes": ["infer", "root"]}, "scopes"),
        ({"rpm": -1}, "rpm"),
        ({"rpm": 1.5}, "rpm"),
        ({"rpm": True}, "rpm"),
        ({"rpm": None}, "rpm"),
        ({"tpm": "7"}, "tpm"),
        ({"tpm": 10**30}, "tpm"),
        ({"priority": 101}, "priority"),
        ({"priority": -101}, "priority"),
        ({"models": [""]}, "models"),
        ({"models": {}}, "models"),
        ({"expires_at": "never"}, "expires_at"),
        ({"expires_at": -1}, "expires_at"),
        ({"expires_at": 10**12}, "expires_at"),
    ],
)
async def test_a_bad_field_is_named_and_no_key_is_made(
    operator: Operator, fields: dict[str, Any], param: str
) -> None:
    refused = await operator.ask("POST", PATH, {"tenant": "acme", "name": "laptop", **fields})
    assert (refused.status, refused.error["param"]) == (400, param)
    assert (await operator.get(PATH))["data"] == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"[]", None),
        (b"{}", "tenant"),
        (b'{"tenant":"a"}', "name"),
        (rb'{"tenant":"a","name":"\ud800"}', None),
    ],
)
async def test_a_body_that_is_no_key_is_refused(
    operator: Operator, body: bytes, param: str | None
) -> None:
    refused = await operator.ask("POST", PATH, body)
    assert (refused.status, refused.error["param"]) == (400, param)


async def test_the_longest_names_are_taken(operator: Operator) -> None:
    key = await made(operator, tenant="a" * 63, name="n" * 128)
    assert (key["tenant"], key["name"]) == ("a" * 63, "n" * 128)


@pytest.mark.parametrize(
    ("method", "path"), [("GET", PATH), ("POST", PATH), ("DELETE", f"{PATH}/x")]
)
async def test_without_a_key_file_there_are_no_keys(method: str, path: str) -> None:
    operator = Operator(Operated().app)
    refused = await operator.ask(method, path, {"tenant": "a", "name": "n"})
    assert (refused.status, refused.error["code"]) == (404, "not_found")
    assert "keys_file" in (refused.error["message"] or "")
