"""A fleet that is computed instead of run: the gateway's own routing, in front of modelled engines, on a virtual clock.

Which policy is best is an experiment. Here the `Registry`, the `Router`, the leases and the policies are the very
objects that serve real traffic, and no rule of theirs is written a second time; only engines, time and traffic are
models. Nothing here reads a clock, opens a socket or draws a number that its caller did not seed.
"""

__all__: list[str] = []
