"""Generate the message modules from their `.proto` sources: `python -m pointsman.proto [FOLDER]`.

For developers only: it needs grpcio-tools, which the gateway itself never imports. Without FOLDER
the files land beside their sources.
"""

import sys
from pathlib import Path

__all__ = ["generate"]

PACKAGE = Path(__file__).parent
"""Where the `.proto` sources live."""

ROOT = PACKAGE.parents[1]
"""The folder that imports start from; a generated module repeats its source's path below it."""


def generate(folder: Path = ROOT) -> list[Path]:
    """Write `pointsman/proto/*_pb2.py` and `*_pb2.pyi` under `folder` and return their paths.

    Raises ModuleNotFoundError without grpcio-tools, RuntimeError where a source does not compile.
    """
    from grpc_tools import protoc

    sources = sorted(path.relative_to(ROOT).as_posix() for path in PACKAGE.glob("*.proto"))
    status = protoc.main(
        ["protoc", f"-I{ROOT}", f"--python_out={folder}", f"--pyi_out={folder}", *sources]
    )
    if status != 0:
        raise RuntimeError(f"protoc failed with status {status}")
    stems = [folder / source.removesuffix(".proto") for source in sources]
    return [stem.with_name(stem.name + end) for stem in stems for end in ("_pb2.py", "_pb2.pyi")]


if __name__ == "__main__":
    for written in generate(*map(Path, sys.argv[1:2])):
        print(written)
