"""Where workers are found that do not announce themselves. Each source tells its whole list whenever that changed."""

__all__: list[str] = []
