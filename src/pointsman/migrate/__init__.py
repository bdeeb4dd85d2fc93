"""Configurations of other gateways, read into ours.

One file per source, each with a table of `Rule`s over the keys or flags that the source has: the same table decides
what is written, what is said on stderr, and what the page about migrating says. What no rule knows is a note as well,
so that nothing gets lost in silence.

Nothing here asks an engine or looks into a cluster. No secret is copied: what is written names environment variables.
"""

__all__: list[str] = []
