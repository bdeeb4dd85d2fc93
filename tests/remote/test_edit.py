"""`routes edit` with a fake editor: what a person wrote is put, or said to be bad, or kept in a file; never lost."""

import json
import re
import shlex
import stat
import sys
from ast import literal_eval
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pointsman.remote.edit import DRAFT_MAX, editor_of

if TYPE_CHECKING:
    from tests.remote.conftest import FakeAdmin, Run

ROUTE: dict[str, object] = {"model": "smol", "backends": [{"model": "smol-v3"}]}
OTHER: dict[str, object] = {"model": "other"}
BETTER = '[[routes]]\nmodel = "better"\n'

EDITOR = """
import pathlib, sys
steps, log, path = map(pathlib.Path, sys.argv[1:])
given = path.read_text()
with log.open("a") as file:
    print(oct(path.stat().st_mode & 0o777), path, repr(given), file=file)
texts = sorted(steps.iterdir())
if not texts:
    sys.exit(3)
path.write_text(texts[0].read_text().replace("GIVEN", given))
texts[0].unlink()
"""
"""Writes the next text of a folder; without another one it fails, as an editor that is left with :cq."""


class Editor:
    """An editor that writes `texts` in turn, and notes what it was given."""

    def __init__(self, folder: Path, *texts: str) -> None:
        steps = folder / "steps"
        steps.mkdir()
        for number, text in enumerate(texts):
            (steps / str(number)).write_text(text)
        script = folder / "editor.py"
        script.write_text(EDITOR)
        self.log = folder / "log"
        self.command = shlex.join([sys.executable, str(script), str(steps), str(self.log)])

    def given(self) -> list[tuple[str, Path, str]]:
        """Return mode, path and text of each file that it was given."""
        rows = (line.split(" ", 2) for line in self.log.read_text().splitlines())
        return [(mode, Path(path), literal_eval(text)) for mode, path, text in rows]


NewEditor = Callable[..., Editor]


@pytest.fixture
def editor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NewEditor:
    """Make an editor; drafts are made in the test's own folder."""
    drafts = tmp_path / "drafts"
    drafts.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(drafts))
    return lambda *texts: Editor(tmp_path, *texts)


def drafts(tmp_path: Path) -> list[Path]:
    """Return the files that are left."""
    return list((tmp_path / "drafts").iterdir())


def serve(admin: "FakeAdmin", *versions: tuple[int, list[dict[str, object]]]) -> None:
    """Let the admin API have these tables, one after the other."""
    admin.says(
        "GET /routes",
        *[
            (200, {"route_epoch": epoch, "routes": routes}, {"etag": f'"routes-{epoch}"'})
            for epoch, routes in versions
        ],
    )


def puts(admin: "FakeAdmin") -> list[tuple[str, object]]:
    """Return the If-Match and the routes of everything that was put."""
    return [
        (headers["if-match"], json.loads(body)["routes"])
        for line, headers, body in admin.asked
        if line == "PUT /routes"
    ]


def test_what_is_saved_is_put_if_nobody_changed_it(
    admin: "FakeAdmin", run: "Run", editor: NewEditor, tmp_path: Path
) -> None:
    serve(admin, (7, [ROUTE]))
    admin.says("PUT /routes", (200, {}, {"etag": '"routes-8"'}))
    used = editor('GIVEN[[routes]]\nmodel = "other"\n')
    result = run("routes", "edit", EDITOR="false", VISUAL=used.command)
    assert result.exit_code == 0, result.output
    assert result.stderr == 'the new table is in force: "routes-7" is now "routes-8"\n'
    assert puts(admin) == [('"routes-7"', [ROUTE, OTHER])]
    [(mode, path, text)] = used.given()
    assert (mode, path.suffix) == ("0o600", ".toml")
    assert text.startswith(f'# The route table of {admin.url}, version "routes-7".\n')
    assert drafts(tmp_path) == []


@pytest.mark.parametrize("text", ["GIVEN", "# a comment\nGIVEN"])
def test_nothing_is_sent_for_the_same_table(
    admin: "FakeAdmin", run: "Run", editor: NewEditor, tmp_path: Path, text: str
) -> None:
    serve(admin, (7, [ROUTE]))
    result = run("routes", "edit", EDITOR=editor(text).command)
    assert result.exit_code == 0
    assert result.stderr.endswith("nothing was sent\n")
    assert admin.lines() == ["GET /routes"]
    assert drafts(tmp_path) == []


def test_bad_text_can_be_made_good(
    admin: "FakeAdmin", run: "Run", editor: NewEditor, tmp_path: Path
) -> None:
    serve(admin, (7, [ROUTE]))
    admin.says("PUT /routes", (400, "routes[0]: not today"), (200, {}, {"etag": '"routes-8"'}))
    used = editor("[[routes]\n", BETTER + "typo = 1\n", BETTER, BETTER)
    result = run("routes", "edit", input="y\n\n\n", EDITOR=used.command)
    assert result.exit_code == 0
    assert re.findall(r"this is no TOML|unknown key 'typo'|not today|in force", result.stderr) == [
        *("this is no TOML", "unknown key 'typo'", "not today", "in force")
    ]
    assert [text for _, _, text in used.given()][1:3] == ["[[routes]\n", BETTER + "typo = 1\n"]
    assert [put[1] for put in puts(admin)] == [[{"model": "better"}]] * 2
    assert drafts(tmp_path) == []


@pytest.mark.parametrize("answer", ["n\n", ""], ids=["no", "nobody there to answer"])
def test_bad_text_is_kept(
    admin: "FakeAdmin", run: "Run", editor: NewEditor, tmp_path: Path, answer: str
) -> None:
    serve(admin, (7, [ROUTE]))
    result = run("routes", "edit", input=answer, EDITOR=editor("[[routes]\n").command)
    [kept] = drafts(tmp_path)
    assert result.exit_code == 1
    assert kept.read_text() == "[[routes]\n"
    assert f"your text is kept in {kept}\n" in result.stderr
    assert puts(admin) == []


def test_a_change_by_somebody_else_is_shown_and_can_be_built_on(
    admin: "FakeAdmin", run: "Run", editor: NewEditor, tmp_path: Path
) -> None:
    serve(admin, (7, [ROUTE]), (8, [ROUTE, OTHER]))
    admin.says("PUT /routes", (412, "stale"), (200, {}, {"etag": '"routes-9"'}))
    used = editor(BETTER, "GIVEN" + BETTER)
    result = run("routes", "edit", input="y\n", EDITOR=used.command)
    [kept] = drafts(tmp_path)
    assert result.exit_code == 0
    assert kept.read_text() == BETTER
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert '+model = "other"' in result.stderr.splitlines()
    told = result.stderr.index(f"your text is kept in {kept}\n")
    assert told < result.stderr.index("Edit the new table?")
    assert f"# What you wrote is in {kept}\n" in used.given()[1][2]
    assert puts(admin) == [
        ('"routes-7"', [{"model": "better"}]),
        ('"routes-8"', [ROUTE, OTHER, {"model": "better"}]),
    ]


def test_who_does_not_build_on_a_change_keeps_the_text(
    admin: "FakeAdmin", run: "Run", editor: NewEditor, tmp_path: Path
) -> None:
    serve(admin, (7, [ROUTE]), (8, [OTHER]))
    admin.says("PUT /routes", (412, "stale"))
    result = run("routes", "edit", input="n\n", EDITOR=editor(BETTER).command)
    assert result.exit_code == 1
    assert [kept.read_text() for kept in drafts(tmp_path)] == [BETTER]
    assert result.stderr.count("your text is kept in") == 1


def test_a_gateway_that_fails_costs_no_text(
    admin: "FakeAdmin", run: "Run", editor: NewEditor, tmp_path: Path
) -> None:
    serve(admin, (7, [ROUTE]))
    admin.says("PUT /routes", (503, "the state cannot be written"))
    result = run("routes", "edit", EDITOR=editor(BETTER).command)
    assert result.exit_code == 1
    assert [kept.read_text() for kept in drafts(tmp_path)] == [BETTER]
    assert result.stderr.endswith("pointsman: the state cannot be written (503)\n")


def test_an_editor_that_fails_sends_nothing(
    admin: "FakeAdmin", run: "Run", editor: NewEditor, tmp_path: Path
) -> None:
    serve(admin, (7, [ROUTE]))
    left = run("routes", "edit", EDITOR=editor().command)
    gone = run("routes", "edit", EDITOR=str(tmp_path / "no-editor"))
    assert (left.exit_code, gone.exit_code) == (1, 1)
    assert left.stderr == "pointsman: the editor ended with status 3; nothing was sent\n"
    assert gone.stderr.startswith("pointsman: cannot run the editor: ")
    assert gone.stderr.endswith("set VISUAL or EDITOR\n")
    assert puts(admin) == []
    assert drafts(tmp_path) == []


def test_an_editor_may_put_another_file_in_the_place_of_its_own(
    admin: "FakeAdmin", run: "Run", editor: NewEditor, tmp_path: Path
) -> None:
    serve(admin, (7, [ROUTE]))
    admin.says("PUT /routes", (200, {}, {"etag": '"routes-8"'}))
    script = tmp_path / "renames"
    script.write_text("#!/bin/sh\necho '[[routes]]\nmodel = \"better\"' > $1.new\nmv $1.new $1\n")
    script.chmod(0o700)
    editor()
    assert run("routes", "edit", EDITOR=str(script)).exit_code == 0
    assert puts(admin) == [('"routes-7"', [{"model": "better"}])]


@pytest.mark.parametrize("command", ["'", "vi '", "vi \\"])
def test_an_editor_that_no_shell_would_understand_is_one_line(
    admin: "FakeAdmin", run: "Run", command: str
) -> None:
    for name in ("VISUAL", "EDITOR"):
        result = run("routes", "edit", **{name: command})
        assert result.exit_code == 1
        assert result.stderr.startswith(f"pointsman: {name} is no command: ")
        assert result.stderr.count("\n") == 1
    assert admin.asked == []


def test_a_blank_editor_is_none(
    admin: "FakeAdmin", run: "Run", editor: NewEditor, tmp_path: Path
) -> None:
    serve(admin, (7, [ROUTE]))
    admin.says("PUT /routes", (200, {}, {"etag": '"routes-8"'}))
    result = run("routes", "edit", VISUAL=" \t", EDITOR=editor(BETTER).command)
    assert result.exit_code == 0, result.output
    assert puts(admin) == [('"routes-7"', [{"model": "better"}])]
    assert drafts(tmp_path) == []
    assert editor_of({"VISUAL": " ", "EDITOR": ""}) == ["vi"]


@pytest.mark.parametrize(
    ("command", "left"),
    [
        ("rm", 0),
        ("sh -c 'rm $0 && mkdir $0'", 1),
        ("sh -c 'rm $0 && ln -s $0 $0'", 0),
    ],
    ids=["nothing", "a folder", "a link to itself"],
)
def test_an_editor_that_leaves_no_file_is_one_line(
    admin: "FakeAdmin", run: "Run", editor: NewEditor, tmp_path: Path, command: str, left: int
) -> None:
    serve(admin, (7, [ROUTE]))
    editor()
    result = run("routes", "edit", VISUAL=command)
    assert result.exit_code == 1
    *kept, told = result.stderr.splitlines()
    assert told.startswith("pointsman: cannot read what the editor left: ")
    assert len(kept) == left
    assert puts(admin) == []


@pytest.mark.parametrize(
    "content",
    [
        b"# caf\xe9\n[[routes]]\n",
        b"routes = " + b"[" * 100_000,
        b"[[routes]]\ndefault_max_tokens = " + b"1" * 5000,
        b"x" * (DRAFT_MAX + 1),
    ],
    ids=["no UTF-8", "nested", "a number without end", "long"],
)
def test_text_that_cannot_be_read_is_kept_byte_for_byte(
    admin: "FakeAdmin", run: "Run", editor: NewEditor, tmp_path: Path, content: bytes
) -> None:
    serve(admin, (7, [ROUTE]))
    editor()
    written = tmp_path / "written"
    written.write_bytes(content)
    result = run("routes", "edit", input="n\n", VISUAL=f"cp {written}")
    [kept] = drafts(tmp_path)
    assert result.exit_code == 1
    assert kept.read_bytes() == content
    assert f"your text is kept in {kept}\n" in result.stderr
    assert puts(admin) == []


def test_a_draft_that_cannot_be_made_is_one_line(
    admin: "FakeAdmin", run: "Run", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "no-folder"))
    serve(admin, (7, [ROUTE]))
    result = run("routes", "edit", VISUAL="true")
    assert result.exit_code == 1
    assert result.stderr.startswith("pointsman: cannot write a file for the editor: ")
    assert result.stderr.count("\n") == 1


def test_an_answer_that_is_nested_too_deeply_costs_no_text(
    admin: "FakeAdmin", run: "Run", editor: NewEditor, tmp_path: Path
) -> None:
    serve(admin, (7, [ROUTE]))
    admin.says("PUT /routes", (500, b"[" * 100_000))
    result = run("routes", "edit", VISUAL=editor(BETTER).command)
    assert result.exit_code == 1
    assert [kept.read_text() for kept in drafts(tmp_path)] == [BETTER]
    assert "does not answer as a gateway's admin API" in result.stderr
