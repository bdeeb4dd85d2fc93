"""The transfer of KV blocks from prefill workers to decode workers: `tl.kv.v1`.

On the prefill worker `state` cuts an exported KV state into blocks and `push` sends them. On the decode worker
`service` takes them, `pool` keeps them until a request resumes, and `state` joins them again. `blocks` says what a
block is and what it is called, `envelope` how it travels.
"""

__all__ = ["KV_FORMAT"]

KV_FORMAT = 101
"""The kv_format on the wire: llama.cpp's f16 cache in the contract's envelopes, version 1.

Not the contract's format 1, though laid out like it: llama.cpp rotates the numbers of a key in pairs of its own choice,
so an engine of another make would read the same bytes as other keys.
"""
