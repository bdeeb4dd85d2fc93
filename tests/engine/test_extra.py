"""The engine's command without the engine's extra."""

import importlib.util
import subprocess
import sys

import pytest

EXTRA = ("google_crc32c", "jinja2", "numpy", "uvicorn", "xllamacpp")


def test_the_engine_extra_is_installed() -> None:
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"pip install 'pointsman[engine]' to test the engine: no {', '.join(missing)}")


def test_the_command_can_be_imported_without_the_extra() -> None:
    code = (
        "import sys, pointsman.engine.command;"
        f"print([name for name in {EXTRA} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr


@pytest.mark.parametrize("name", EXTRA)
def test_a_missing_extra_is_told_with_its_remedy(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pointsman.engine.command import EngineOptions, run

    for extra in EXTRA:
        monkeypatch.setitem(sys.modules, extra, sys.modules["sys"])
    # None in sys.modules is what makes an import fail.
    monkeypatch.setitem(sys.modules, name, None)
    assert run(EngineOptions()) == 2
    message = capsys.readouterr().err
    assert "pip install 'pointsman[engine]'" in message
    assert f"{name} is missing" in message
