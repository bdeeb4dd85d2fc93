"""Prove the tests: every known mistake, applied to a copy of the source, must be caught by the test named for it.

`mutants.toml` lists the mistakes; each has a patch `<id>.patch` beside it, against the root of the project. For each,
this program copies `src` to a temporary folder, applies the patch there, and runs the one test with the copy first on
the path. The test must fail, and must pass on the unchanged source. Exit status 1 if a mutant survives, a patch does
not apply, or a test cannot run.

Usage: python tests/mutants/run.py [id ...]
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

PASSED, FAILED = 0, 1  # pytest's exit statuses; any other means that it could not run the test


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake: what it breaks, and the test that must notice."""

    id: str
    breaks: str
    test: str


def read_table(path: Path) -> list[Mutant]:
    """Return the mutants of a table, in its order."""
    table = tomllib.loads(path.read_text())
    return [Mutant(id, **entry) for id, entry in table.items()]


def run_test(source: Path, test: str) -> int:
    """Run one test against the package below `source` and return pytest's exit status."""
    # Only the plugins that tests need: finding and loading all of them takes longer than a test.
    environ = {
        **os.environ,
        "PYTHONPATH": str(source),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    plugins = ["-p", "anyio", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-x", *plugins, test]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, check=False)
    return done.returncode


def mutate(mutant: Mutant, folder: Path) -> str | None:
    """Make the mutated copy in `folder`; return what went wrong, if anything."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    command = ["git", "apply", "-p1", str(HERE / f"{mutant.id}.patch")]
    # Not below the project's own repository, or git would look for the files there.
    environ = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    return None if done.returncode == 0 else f"patch does not apply: {done.stderr.strip()}"


def verdict(mutant: Mutant) -> str:
    """Return "killed", or why it was not."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trouble = mutate(mutant, folder)
        if trouble:
            return trouble
        status = run_test(folder / "src", mutant.test)
    if status == FAILED:
        return "killed"
    return "SURVIVED" if status == PASSED else f"pytest could not run it (exit {status})"


def main() -> int:
    """Print the table and return the exit status."""
    wanted = set(sys.argv[1:])
    mutants = [m for m in read_table(HERE / "mutants.toml") if not wanted or m.id in wanted]
    tests = sorted({mutant.test for mutant in mutants})
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        unmutated = pool.map(lambda test: run_test(ROOT / "src", test), tests)
        broken = {test for test, status in zip(tests, unmutated, strict=True) if status != PASSED}
        verdicts = list(pool.map(verdict, mutants))
    killed = 0
    for mutant, outcome in zip(mutants, verdicts, strict=True):
        if mutant.test in broken:
            outcome = "the test does not pass on the unchanged source"
        killed += outcome == "killed"
        print(f"{mutant.id:10}{outcome:10} {mutant.breaks}\n{'':10}by {mutant.test}")
    print(f"{killed} killed, {len(mutants) - killed} survived")
    return 0 if killed == len(mutants) > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
