"""`pointsman keys`: the key is the last line of stdout and stands nowhere else; mistakes are one line and a status."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from pointsman.cli_keys import keys_app
from pointsman.control.keyfile import KeyFile
from pointsman.domain.keys import Key, Keyring, Scope, digest

PEPPER = {"TL_GATEWAY_PEPPER": "pepper"}
HMAC = digest(b"pepper", 32 * b"A")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.jsonl"


def run(*args: object, environ: dict[str, str] = PEPPER) -> Result:
    outside = {"TL_GATEWAY_PEPPER": None, "TL_GATEWAY__KEYS_FILE": None}
    return CliRunner().invoke(keys_app, list(map(str, args)), env={**outside, **environ})


def create(path: Path, *more: object) -> Result:
    return run("create", "--keys-file", path, "--tenant", "acme", "--name", "laptop", *more)


def only(path: Path) -> Key:
    [key] = KeyFile(path, None).list()
    return key


def write(path: Path, *records: dict[str, object]) -> None:
    usual = {"hmac": HMAC, "tenant": "acme", "name": "laptop", "created_at": 1_767_225_600}
    path.write_text("".join(json.dumps(usual | record) + "\n" for record in records))


def test_the_last_line_of_stdout_is_a_key_that_opens_the_gateway(path: Path) -> None:
    done = create(path)
    assert done.exit_code == 0
    [text] = done.stdout.splitlines()
    keyring = Keyring(b"pepper", wall=time.time, cache_key=bytes(16))
    KeyFile(path, keyring).load()
    assert keyring.admit(f"Bearer {text}".encode(), 0.0).key_id == only(path).key_id
    assert text[-32:] not in done.stderr
    assert text[-32:] not in path.read_text()


def test_a_key_has_the_defaults_of_the_contract(path: Path) -> None:
    before = int(time.time())
    assert create(path).exit_code == 0
    key = only(path)
    assert (key.tenant, key.name, key.scopes, key.models) == ("acme", "laptop", (Scope.INFER,), ())
    assert (key.rpm, key.tpm, key.priority, key.expires_at) == (60, 100_000, 0, None)
    assert before <= key.created_at <= time.time()


def test_a_key_is_made_as_asked_and_said_to_be_so(path: Path) -> None:
    done = create(
        path,
        *("--scope", "infer", "--scope", "debug", "--rpm", 0, "--tpm", 7, "--priority", -100),
        *("--model", "smol", "--model", "a/b", "--expires-in", "30d"),
    )
    key = only(path)
    assert (key.scopes, key.models) == ((Scope.INFER, Scope.DEBUG), ("smol", "a/b"))
    assert (key.rpm, key.tpm, key.priority) == (0, 7, -100)
    assert key.expires_at == key.created_at + 30 * 86_400
    for said in ("infer, debug", "smol, a/b", "any rpm, 7 tpm, priority -100", key.key_id):
        assert said in done.stderr


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("5m", 300), ("12h", 43_200), ("2w", 1_209_600)]
)
def test_an_expiry_is_said_in_any_unit(path: Path, text: str, seconds: int) -> None:
    create(path, "--expires-in", text)
    key = only(path)
    assert key.expires_at == key.created_at + seconds


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        *(("--expires-in", text, "such as 30d") for text in ("30", "d", "0d", "-1d", "1y", "1 d")),
        ("--expires-in", "999999999w", "expires_at"),
        ("--tenant", "Acme", "tenant"),
        ("--name", "", "name"),
        ("--name", 129 * "x", "name"),
        ("--scope", "root", "root"),
        ("--priority", "101", "100"),
        ("--rpm", "-1", "--rpm"),
        ("--model", "", "models"),
    ],
)
def test_what_no_key_may_have_is_wrong_usage(
    path: Path, option: str, value: str, told: str
) -> None:
    done = create(path, f"{option}={value}")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert told in done.stderr
    assert not path.exists()


@pytest.mark.parametrize("environ", [{}, {"TL_GATEWAY_PEPPER": ""}])
def test_without_a_pepper_no_key_is_made(path: Path, environ: dict[str, str]) -> None:
    args = ("--keys-file", path, "--tenant", "acme", "--name", "laptop")
    done = run("create", *args, environ=environ)
    assert done.exit_code == 2
    assert done.stderr.startswith("pointsman: TL_GATEWAY_PEPPER is empty or not set")
    assert (done.stdout, path.exists()) == ("", False)


def test_the_pepper_and_the_file_may_come_from_elsewhere(path: Path) -> None:
    environ = {"SALT": "pepper", "TL_GATEWAY__KEYS_FILE": str(path)}
    args = ("--tenant", "acme", "--name", "laptop", "--pepper-env", "SALT")
    text = run("create", *args, environ=environ).stdout.strip()
    assert only(path).hmac == digest(b"pepper", text[-32:].encode())


def test_keys_are_listed_newest_first_without_a_digest(path: Path) -> None:
    write(
        path,
        {"key_id": 12 * "a", "expires_at": 1_767_225_601},
        {"key_id": 12 * "b", "created_at": 1_767_312_000, "models": ["smol"], "rpm": 0},
        {"key_id": 12 * "c", "created_at": 1_767_225_599, "revoked": True, "tenant": "other"},
    )
    done = run("list", "--keys-file", path, environ={})
    assert done.exit_code == 0
    _, *rows = done.stdout.splitlines()
    assert [(row.split()[0][0], row.split()[-1]) for row in rows] == [
        *(("b", "good"), ("a", "expired"), ("c", "revoked"))
    ]
    assert "smol" in rows[0]
    assert "any rpm" in rows[0]
    assert "2026-01-02 00:00 UTC" in rows[0]
    assert HMAC[:8] not in done.stdout
    assert "other" not in run("list", "--keys-file", path, "--tenant", "acme").stdout
    assert run("list", "--keys-file", path, "--tenant", "nobody").stdout == "no keys\n"


def test_keys_are_listed_for_scripts_as_the_admin_api_lists_them(path: Path) -> None:
    write(path, {"key_id": 12 * "a", "expires_at": "2026-01-01T00:00:01Z"})
    [key] = json.loads(run("list", "--keys-file", path, "--json").stdout)["data"]
    assert key == {
        **{"key_id": 12 * "a", "tenant": "acme", "name": "laptop", "scopes": ["infer"]},
        **{"rpm": 60, "tpm": 100_000, "priority": 0, "models": []},
        **{"created_at": 1_767_225_600, "expires_at": 1_767_225_601, "revoked": False},
    }
    from pointsman.control.admin.shapes import KeyInfo

    assert list(key) == list(KeyInfo.__struct_fields__)


def test_no_name_moves_the_cursor_or_is_taken_for_markup(path: Path) -> None:
    write(path, {"key_id": 12 * "a", "name": "\x1b[2J", "models": ["[red]m", "\x07"]})
    done = run("list", "--keys-file", path)
    assert "\x1b" not in done.stdout
    assert "\x07" not in done.stdout
    assert r"'\x1b[2J'" in done.stdout
    assert "[red]m" in done.stdout


def test_a_key_is_revoked_by_its_id(path: Path) -> None:
    create(path)
    key_id = only(path).key_id
    for _ in range(2):
        done = run("revoke", key_id, "--keys-file", path, environ={})
        assert (done.exit_code, done.stderr) == (0, f"revoked {key_id}\n")
        assert only(path).revoked


def test_a_key_taken_for_its_id_is_not_repeated(path: Path) -> None:
    text = create(path).stdout.strip()
    done = run("revoke", text, "--keys-file", path)
    assert done.exit_code == 1
    assert "no key has this id" in done.stderr
    assert text not in done.output
    assert not only(path).revoked


@pytest.mark.parametrize("command", [["list"], ["revoke", 12 * "a"]])
def test_a_file_that_is_missing_or_bad_is_one_line(path: Path, command: list[str]) -> None:
    done = run(*command, "--keys-file", path)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(f"pointsman: {path}: No such file")
    path.write_text("{}\n")
    done = run(*command, "--keys-file", path)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(f"pointsman: {path}, line 1: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_command_is_there_in_a_real_process(path: Path) -> None:
    command = [sys.executable, "-m", "pointsman", "keys", "create", "--keys-file", str(path)]
    done = subprocess.run(
        [*command, "--tenant", "acme", "--name", "ci"],
        env={**os.environ, **PEPPER},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1].startswith(f"tl_{only(path).key_id}_")


PAGE = (Path(__file__).parents[1] / "docs" / "keys.md").read_text()


def test_the_page_names_every_option_of_create_with_its_default() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `--")]
    shown = {option for row in rows for option in re.findall(r"--[a-z-]+", row.split("|")[1])}
    command = typer.main.get_command(keys_app)
    assert isinstance(command, typer.core.TyperGroup)
    options = {option for each in command.commands["create"].params for option in each.opts}
    assert shown == options - {"--keys-file", "--help"}


def test_the_record_on_the_page_is_one(path: Path) -> None:
    [record] = re.findall(r"```json\n(.*\n)```", PAGE)
    path.write_text(record)
    key = only(path)
    assert (key.tenant, key.hmac) == ("acme", HMAC)
    assert set(json.loads(record)) == set(Key.__struct_fields__)
