"""A running gateway as its operators see it: the admin API called from outside, and its answers for people to read.

Nothing here runs in a gateway. The commands that use it are in `pointsman.cli_operator`.
"""

__all__: list[str] = []
