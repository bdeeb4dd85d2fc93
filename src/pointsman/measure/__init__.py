"""An engine, measured from outside: what `pointsman profile` asks, and what it makes of the answers."""

__all__: list[str] = []
