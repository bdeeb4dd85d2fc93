"""Answers that are asked for once."""

import resource
from pathlib import Path

import httpx
import pytest

from pointsman.sweep.asking import Answer, Asker, SweepError
from pointsman.sweep.kept import Kept, digest
from pointsman.sweep.reading import Prompt

ONE = Prompt(1, "/v1/completions", {"prompt": "a secret", "max_tokens": 1})
TWO = Prompt(2, "/v1/completions", {"prompt": "b"})
YES = Answer("yes", (-0.5, None), (1.0, None), 3, 2, 0.25)
NO = Answer("no", (), (), 3, 2, 0.5)


def asker(model: str = "m", *, logprobs: bool = True) -> Asker:
    return Asker(httpx.AsyncClient(), model, with_logprobs=logprobs, timeout_s=1)


M = asker()


def test_without_a_file_answers_last_as_long_as_the_run() -> None:
    with Kept(None) as kept:
        kept.add(M, ONE, YES)
        assert kept.find(M, ONE) == YES
        assert kept.find(M, TWO) is None


def test_a_file_gives_back_what_was_kept_and_has_no_prompt_in_it(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    with Kept(file) as kept:
        kept.add(M, ONE, YES)
    with Kept(file) as kept:
        assert kept.find(M, ONE) == YES
        kept.add(M, TWO, NO)
    with Kept(file) as kept:
        assert (kept.find(M, ONE), kept.find(M, TWO)) == (YES, NO)
    assert file.read_bytes().count(b"\n") == 2
    assert b"secret" not in file.read_bytes()


def test_another_question_is_another_digest() -> None:
    same = Prompt(9, ONE.path, dict(reversed(ONE.body.items())), ("right",))
    assert digest(M, same) == digest(M, ONE)
    others = [
        digest(M, TWO),
        digest(asker("n"), ONE),
        digest(asker(logprobs=False), ONE),
        digest(M, Prompt(1, "/v1/chat/completions", ONE.body)),
        digest(M, Prompt(1, ONE.path, ONE.body | {"max_tokens": 2})),
    ]
    assert len({digest(M, ONE), *others}) == 6


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_run_that_was_stopped_in_a_line_is_gone_on_with(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "answers.jsonl"
    with Kept(file) as kept:
        kept.add(M, ONE, YES)
        kept.add(M, TWO, NO)
    file.write_bytes(file.read_bytes()[:-cut])
    with Kept(file) as kept:
        assert kept.find(M, ONE) == YES
        assert kept.find(M, TWO) == (NO if cut == 1 else None)
        kept.add(M, TWO, NO)
    with Kept(file) as kept:
        assert (kept.find(M, ONE), kept.find(M, TWO)) == (YES, NO)


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_bytes(b"buy milk\nand bread\n")
    with pytest.raises(SweepError, match=r"notes\.txt: line 1: "), Kept(file):
        pass
    assert file.read_bytes() == b"buy milk\nand bread\n"
    file.write_bytes(b"buy milk")
    with pytest.raises(SweepError, match=r"notes\.txt: line 1: "), Kept(file):
        pass
    assert file.read_bytes() == b"buy milk"


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match=r"cannot use .*gone"), Kept(tmp_path / "gone" / "a"):
        pass


def test_a_disk_that_is_full_ends_the_sweep(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Kept(tmp_path / "answers") as kept:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
        try:
            with pytest.raises(SweepError, match=r"cannot use .*answers: File too large"):
                kept.add(M, ONE, YES)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
