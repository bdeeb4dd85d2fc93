"""Fakes and conformance functions, shipped so that third-party policies and engines can use them in their own tests.

`policies.check_policy` judges a policy, `origin.Origin` is an engine that does what a test says, `client.Client` a
client that sees every byte, `stories.Dialogue` plays the driver of a story. Nothing here is imported by the gateway.
"""

__all__: list[str] = []
