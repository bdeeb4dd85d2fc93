"""Pointsman: a gateway in front of a fleet of LLM inference engines."""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("pointsman")
