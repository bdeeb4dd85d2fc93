"""Fakes and conformance functions, shipped for tests of policies and engines outside this package too."""

__all__: list[str] = []
