"""Who may import whom, and the other rules that hold for every file of the source. Read from its syntax."""

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src"
GENERATED = {
    "pointsman.proto.control_pb2",
    "pointsman.proto.engine_pb2",
    "pointsman.proto.kv_pb2",
}

LAYERS: dict[str, set[str]] = {
    # Below the line: no loop, socket, clock, log or random module state.
    "errors": set(),
    "domain": {"errors", "msgspec"},
    "wire": {"domain", "errors", "httptools", "msgspec"},
    "dialect": {"wire", "domain", "errors", "proto", "google", "msgspec"},
    "flow": {"dialect", "wire", "domain", "errors", "msgspec"},
    # The sockets of the data path.
    "net": {
        *("certificates", "flow", "wire", "domain", "errors"),
        *("grpc", "httptools", "jinja2", "msgspec", "tokenizers"),
    },
    # Beside it: they share objects with the data path, and none of its code.
    "control": {
        "aiohttp",
        "certificates",
        "dialect",
        "dns",
        "domain",
        "errors",
        "proto",
        "google",
        "grpc",
        "kubernetes_asyncio",
        "msgspec",
        "starlette",
        "zmq",
    },
    "observe": {"flow", "domain", "msgspec", "opentelemetry", "prometheus_client"},
    "config": {"certificates", "dialect", "domain", "errors", "msgspec"},
    "certificates": set(),
    "proto": {"grpc_tools"},
    # On top: they put the parts together.
    "app": {
        *(
            "certificates",
            "config",
            "control",
            "dialect",
            "domain",
            "errors",
            "fleet",
            "flow",
            "net",
            "observe",
            "parts",
            "wire",
        ),
        *("msgspec", "uvloop"),
    },
    "heartbeat": {"proto", "grpc"},
    "agent": {
        *("certificates", "config", "control", "domain", "fleet", "heartbeat", "net", "proto"),
        *("grpc", "uvloop"),
    },
    "fleet": {"config", "control", "dialect", "domain", "errors", "flow", "net", "parts"},
    "parts": {"config", "control", "domain", "errors", "net", "msgspec"},
    "cli_input": {"typer"},
    "cli_output": {"rich"},
    "cli_profile": {"cli_input", "cli_output", "measure", "simulate", "sweep", "typer"},
    "cli_simulate": {"cli_output", "config", "domain", "simulate", "rich", "typer"},
    "cli_agent": {"agent", "config", "domain", "errors", "parts", "grpc", "typer"},
    "cli_admin": {"control", "typer"},
    "cli_cascade": {"cli_input", "cli_output", "domain", "errors", "sweep", "rich", "typer"},
    "cli_config": {"config", "typer"},
    "cli_import": {"migrate", "typer"},
    "cli_keys": {"cli_output", "control", "domain", "msgspec", "rich", "typer"},
    "cli_operator": {"cli_input", "cli_output", "domain", "remote", "msgspec", "rich", "typer"},
    "cli": {
        "app",
        "cli_admin",
        "cli_agent",
        "cli_cascade",
        "cli_config",
        "cli_import",
        "cli_keys",
        "cli_operator",
        "cli_profile",
        "cli_simulate",
        "config",
        "demo",
        "engine",
        "rich",
        "typer",
    },
    "__main__": {"cli"},
    # Apart: a real engine, which the gateway never imports, and what tests are written with.
    "engine": {
        *("domain", "heartbeat", "proto"),
        *(
            "google_crc32c",
            "grpc",
            "jinja2",
            "msgspec",
            "numpy",
            "rich",
            "starlette",
            "typer",
            "uvicorn",
            "xllamacpp",
        ),
    },
    "remote": {"domain", "errors", "tomltext", "httpx", "msgspec", "rich"},
    "sweep": {"domain", "errors", "wire", "httpx", "matplotlib", "msgspec", "rich"},
    "migrate": {"config", "tomltext", "yaml"},
    "measure": {"dialect", "simulate", "tomltext", "wire", "httpx", "msgspec"},
    # The domain on a virtual clock.
    "simulate": {"domain", "errors", "matplotlib", "msgspec", "rich"},
    "tomltext": set(),
    "demo": {"app", "config", "domain", "flow", "observe", "trial", "rich", "uvloop"},
    "trial": {"rich"},
    "testing": {
        *("app", "config", "control", "dialect", "domain", "errors", "flow", "parts"),
        *("proto", "wire"),
        *(
            "gguf",
            "grpc",
            "jsonschema_rs",
            "msgspec",
            "numpy",
            "trustme",
            "typer",
            "xllamacpp",
            "zmq",
        ),
    },
}
"""What each part may import besides itself and the standard library: parts of the package, and distributions."""

PURE = ("errors", "domain", "wire", "dialect", "flow")

IMPURE = {
    *("asyncio", "concurrent", "contextvars", "datetime", "io", "logging", "multiprocessing", "os"),
    *(
        "pathlib",
        "queue",
        "random",
        "secrets",
        "selectors",
        "shutil",
        "signal",
        "socket",
        "sqlite3",
    ),
    *("ssl", "subprocess", "sys", "tempfile", "threading", "time", "uuid", "warnings"),
}
"""What nothing below the line may import of the standard library."""

LAST_RESORTS = {
    "pointsman.app.gateway": ["Exception"],
    "pointsman.net.driver": ["Exception"],
    "pointsman.net.asgi": ["Exception"],
    "pointsman.net.pool": ["BaseException"],
    "pointsman.net.tokenizing": ["Exception"],
    "pointsman.control.discovery.sources": ["Exception"],
    "pointsman.control.discovery.informer": ["Exception"],
    "pointsman.control.heartbeat": ["Exception"],
    "pointsman.control.kv_events": ["Exception"],
    "pointsman.control.mounts": ["Exception"],
    "pointsman.control.polling": ["Exception", "Exception"],
    "pointsman.control.reload": ["Exception"],
    "pointsman.heartbeat": ["Exception"],
    "pointsman.engine.scheduler": ["Exception"],
    "pointsman.observe.logs": ["Exception"],
    "pointsman.testing.stories": ["BaseException", "BaseException"],
}
"""The only places that catch what nobody foresaw: a driver, a server, a watch or a thread must outlive it."""


def parsed() -> dict[str, ast.Module]:
    """Return the syntax trees of all modules but the generated ones."""
    trees = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = ast.parse(path.read_text(), str(path))
    return {name: tree for name, tree in trees.items() if name not in GENERATED}


TREES = parsed()
every_module = pytest.mark.parametrize("name", TREES)


def layer(module: str) -> str:
    """Return the row of a module in the table: the part of the package, or the distribution."""
    top, _, rest = module.partition(".")
    return rest.partition(".")[0] if top == "pointsman" and rest else top


def imports(tree: ast.AST, *, typing: bool = True) -> Iterator[str]:
    """Yield the modules that a tree imports; those for the type checker only where `typing` is true."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                known = submodule in TREES or submodule in GENERATED
                yield submodule if known else node.module
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not typing:
            yield from (name for other in node.orelse for name in imports(other, typing=False))
        else:
            yield from imports(node, typing=typing)


def exported(tree: ast.Module) -> list[str] | None:
    """Return `__all__`, None where there is none."""
    for node in tree.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name("__all__")], value=value)
                | ast.AnnAssign(target=ast.Name("__all__"), value=ast.expr() as value)
            ):
                names = ast.literal_eval(value)
                assert isinstance(names, list)
                return names
    return None


def bound(tree: ast.Module) -> set[str]:
    """Return the names that a module binds at its top level."""
    names = set()
    for node in tree.body:
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                names.add(name)
            case ast.Import(aliases) | ast.ImportFrom(names=aliases):
                names.update(alias.asname or alias.name for alias in aliases)
            case ast.Assign(targets):
                names.update(target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(ast.Name(name), value=ast.expr()):
                names.add(name)
    return names


def in_order(name: str) -> tuple[int, str]:
    """Sort constants, then classes, then functions, as ruff does."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2), name


def caught(tree: ast.Module) -> list[str]:
    """Return the names of the exceptions that are caught in a module, one by one."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, "a bare except catches what nobody meant"
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            names += [ast.unparse(kind) for kind in kinds]
    return names


@every_module
def test_imports_follow_the_table(name: str) -> None:
    row = layer(name)
    if name == "pointsman":
        allowed = set()
    else:
        assert row in LAYERS, f"give {row} a row in the table"
        allowed = LAYERS[row] | {row, "pointsman"}
    foreign = {layer(module) for module in imports(TREES[name])} - sys.stdlib_module_names
    assert foreign <= allowed, f"{name} may not import {sorted(foreign - allowed)}"


@pytest.mark.parametrize("name", [name for name in TREES if layer(name) in PURE])
def test_nothing_below_the_line_knows_of_the_world(name: str) -> None:
    tops = {module.partition(".")[0] for module in imports(TREES[name])}
    assert not tops & IMPURE
    kinds = ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith
    assert not [node for node in ast.walk(TREES[name]) if isinstance(node, kinds)]


def test_there_are_no_cycles() -> None:
    graph = {
        name: {m for m in imports(tree, typing=False) if m in TREES and m != name}
        for name, tree in TREES.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' <- '.join(error.args[1])}")


def test_the_gateway_never_imports_the_engine() -> None:
    reached = ["pointsman.app.gateway", "pointsman.app.command"]
    for name in reached:
        reached += {m for m in imports(TREES[name]) if m in TREES} - set(reached)
    assert len(reached) > 20
    assert not [name for name in reached if layer(name) in ("engine", "testing", "demo", "cli")]


@every_module
def test_every_module_says_what_it_is_for(name: str) -> None:
    docstring = ast.get_docstring(TREES[name])
    assert docstring is not None
    assert re.match(r"[^\n]+[.:](\n\n|\Z)|[^\n]+\n[^\n]+[.:](\n\n|\Z)", docstring), docstring


@every_module
def test_every_module_names_its_public_names_in_order(name: str) -> None:
    names = exported(TREES[name])
    if name.endswith("__main__"):
        return
    assert names is not None, "__all__ is missing"
    assert names == sorted(set(names), key=in_order)
    assert set(names) <= bound(TREES[name])


@every_module
def test_what_nobody_foresaw_is_caught_in_few_places(name: str) -> None:
    wide = [kind for kind in caught(TREES[name]) if kind in ("Exception", "BaseException")]
    assert wide == LAST_RESORTS.get(name, [])


def test_the_tables_name_nothing_that_is_gone() -> None:
    assert set(LAST_RESORTS) <= set(TREES)
    assert {layer(name) for name in TREES} - {"pointsman"} >= set(LAYERS)
