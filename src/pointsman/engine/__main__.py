"""`python -m pointsman.engine`: the engine's command by itself."""

import typer

from pointsman.engine.command import engine

__all__: list[str] = []

if __name__ == "__main__":
    typer.run(engine)
