"""A fleet on a virtual clock: the real policies before modelled engines."""

__all__: list[str] = []
