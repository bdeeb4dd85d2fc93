"""Mounts: what is imported, and that every failure names the mount and the reason."""

from pathlib import Path
from typing import Any

import pytest

from pointsman.config import Mount
from pointsman.control.mounts import MountError, load_mount

PAGES = """
class Site:
    async def application(self, scope, receive, send):
        ...

async def app(scope, receive, send):
    ...

site = Site()
number = 7
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mounted").mkdir()
    (tmp_path / "mounted" / "__init__.py").touch()
    (tmp_path / "mounted" / "pages.py").write_text(PAGES)
    (tmp_path / "mounted" / "broken.py").write_text("raise RuntimeError('no database')")
    (tmp_path / "mounted" / "mistyped.py").write_text("def (")
    (tmp_path / "mounted" / "needs.py").write_text("import mounted_needs_this")
    (tmp_path / "mounted" / "stops.py").write_text("from mounted.pages import absent")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("name", ["app", "site.application"])
def test_an_application_is_imported_by_its_name(name: str) -> None:
    application: Any = load_mount(Mount(path="/pages", app=f"mounted.pages:{name}"))
    assert callable(application)
    assert application.__module__ == "mounted.pages"


@pytest.mark.parametrize(
    ("app", "why"),
    [
        ("", "expected package.module:name"),
        ("mounted.pages", "expected package.module:name"),
        ("mounted.pages:", "expected package.module:name"),
        (":app", "expected package.module:name"),
        ("mounted..pages:app", "expected package.module:name"),
        (".pages:app", "expected package.module:name"),
        ("mounted.pages:app()", "expected package.module:name"),
        (
            "nowhere_at_all.pages:app",
            "no module 'nowhere_at_all'; is it installed, or in PYTHONPATH?",
        ),
        ("mounted.nowhere:app", "no module 'mounted.nowhere'; is it installed, or in PYTHONPATH?"),
        ("mounted.needs:app", "no module 'mounted_needs_this'; is it installed, or in PYTHONPATH?"),
        ("mounted.broken:app", "importing mounted.broken failed: RuntimeError: no database"),
        ("mounted.mistyped:app", "importing mounted.mistyped failed: SyntaxError: "),
        ("mounted.stops:app", "importing mounted.stops failed: ImportError: cannot import name"),
        ("mounted.pages:absent", "mounted.pages has no 'absent'"),
        ("mounted.pages:site.absent", "mounted.pages has no 'site.absent'"),
        ("mounted.pages:number", "'number' is int, no ASGI application"),
    ],
)
def test_what_cannot_be_served_names_the_mount_and_the_reason(app: str, why: str) -> None:
    with pytest.raises(MountError) as refused:
        load_mount(Mount(path="/pages", app=app))
    assert str(refused.value).startswith(f"mount /pages ({app}): {why}")
