"""What engines are told and how their answers are read, as pure functions: calls out, values in, no I/O.

A dialect is one file. `tl` speaks the contracts `tl.engine.v1` and `tl.kv.v1`: how a prompt is tokenized, prefilled on
one worker for another, and how what a worker holds for that is given back.
"""

__all__: list[str] = []
