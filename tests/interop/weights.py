"""Prints the path of the project's default model, and fetches it first where it is missing."""

import os

from rich.console import Console

from pointsman.engine.weights import cache_folder, default_weights

if __name__ == "__main__":
    print(default_weights(cache_folder(os.environ), Console(stderr=True)))
