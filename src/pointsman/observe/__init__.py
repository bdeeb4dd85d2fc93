"""What the gateway tells about itself, read from the record of each finished request."""

__all__: list[str] = []
