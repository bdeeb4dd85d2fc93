"""llama.cpp through ctypes: the few calls of `llama.h` that a scheduling loop needs.

The library is the extension module of the `xllamacpp` wheel, which exports the whole C API. The structs are
declared here, so a new build with another layout would be read wrongly without a word: `load_library` compares
the defaults that the library reports with the ones written down below, field by field, and refuses to go on
when they differ.

This module knows the shape of tensors and nothing else: no sampling, no scheduling, no text beyond bytes. A
`Context` belongs to one thread; a `Model` only reads and may be shared. ctypes lets go of the GIL during a
call, so other threads run while llama.cpp computes.
"""

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["Context", "LayoutChanged", "LlamaError", "Model", "Row", "load_library"]


class LlamaError(RuntimeError):
    """A call of llama.cpp that failed."""


class LayoutChanged(LlamaError):
    """The library is another build than the one whose structs are written down here."""


class _ModelParams(ctypes.Structure):
    _fields_ = (
        ("devices", ctypes.c_void_p),
        ("tensor_buft_overrides", ctypes.c_void_p),
        ("n_gpu_layers", ctypes.c_int32),
        ("split_mode", ctypes.c_int32),
        ("load_mode", ctypes.c_int32),
        ("lazy_mode", ctypes.c_int32),
        ("main_gpu", ctypes.c_int32),
        ("tensor_split", ctypes.c_void_p),
        ("progress_callback", ctypes.c_void_p),
        ("progress_callback_user_data", ctypes.c_void_p),
        ("kv_overrides", ctypes.c_void_p),
        ("vocab_only", ctypes.c_bool),
        ("check_tensors", ctypes.c_bool),
        ("use_extra_bufts", ctypes.c_bool),
        ("no_host", ctypes.c_bool),
        ("no_alloc", ctypes.c_bool),
        ("load_mtp", ctypes.c_bool),
    )


class _ContextParams(ctypes.Structure):
    _fields_ = (
        ("n_ctx", ctypes.c_uint32),
        ("n_batch", ctypes.c_uint32),
        ("n_ubatch", ctypes.c_uint32),
        ("n_seq_max", ctypes.c_uint32),
        ("n_rs_seq", ctypes.c_uint32),
        ("n_outputs_max", ctypes.c_uint32),
        ("n_outputs_max_per_seq", ctypes.c_uint32),
        ("n_threads", ctypes.c_int32),
        ("n_threads_batch", ctypes.c_int32),
        ("ctx_type", ctypes.c_int32),
        ("rope_scaling_type", ctypes.c_int32),
        ("pooling_type", ctypes.c_int32),
        ("attention_type", ctypes.c_int32),
        ("flash_attn_type", ctypes.c_int32),
        ("rope_freq_base", ctypes.c_float),
        ("rope_freq_scale", ctypes.c_float),
        ("yarn_ext_factor", ctypes.c_float),
        ("yarn_attn_factor", ctypes.c_float),
        ("yarn_beta_fast", ctypes.c_float),
        ("yarn_beta_slow", ctypes.c_float),
        ("yarn_orig_ctx", ctypes.c_uint32),
        ("defrag_thold", ctypes.c_float),
        ("cb_eval", ctypes.c_void_p),
        ("cb_eval_user_data", ctypes.c_void_p),
        ("type_k", ctypes.c_int32),
        ("type_v", ctypes.c_int32),
        ("moe_cache_size", ctypes.c_size_t),
        ("abort_callback", ctypes.c_void_p),
        ("abort_callback_data", ctypes.c_void_p),
        ("embeddings", ctypes.c_bool),
        ("offload_kqv", ctypes.c_bool),
        ("no_perf", ctypes.c_bool),
        ("op_offload", ctypes.c_bool),
        ("swa_full", ctypes.c_bool),
        ("kv_unified", ctypes.c_bool),
        ("samplers", ctypes.c_void_p),
        ("n_samplers", ctypes.c_size_t),
        ("ctx_other", ctypes.c_void_p),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


_MODEL_DEFAULTS: dict[str, object] = {
    "devices": None,
    "tensor_buft_overrides": None,
    "n_gpu_layers": -1,
    "split_mode": 1,
    "load_mode": -1,
    "lazy_mode": 1,
    "main_gpu": 0,
    "tensor_split": None,
    "progress_callback": None,
    "progress_callback_user_data": None,
    "kv_overrides": None,
    "vocab_only": False,
    "check_tensors": False,
    "use_extra_bufts": True,
    "no_host": False,
    "no_alloc": False,
    "load_mtp": False,
}
_CONTEXT_DEFAULTS: dict[str, object] = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_rs_seq": 0,
    "n_outputs_max": 0,
    "n_outputs_max_per_seq": 1,
    "n_threads": 4,
    "n_threads_batch": 4,
    "ctx_type": 0,
    "rope_scaling_type": -1,
    "pooling_type": -1,
    "attention_type": -1,
    "flash_attn_type": -1,
    "rope_freq_base": 0.0,
    "rope_freq_scale": 0.0,
    "yarn_ext_factor": -1.0,
    "yarn_attn_factor": -1.0,
    "yarn_beta_fast": -1.0,
    "yarn_beta_slow": -1.0,
    "yarn_orig_ctx": 0,
    "defrag_thold": -1.0,
    "cb_eval": None,
    "cb_eval_user_data": None,
    "type_k": 1,
    "type_v": 1,
    "moe_cache_size": 0,
    "abort_callback": None,
    "abort_callback_data": None,
    "embeddings": False,
    "offload_kqv": True,
    "no_perf": True,
    "op_offload": True,
    "swa_full": True,
    "kv_unified": False,
    "samplers": None,
    "n_samplers": 0,
    "ctx_other": None,
}

_P = ctypes.c_void_p
_I32 = ctypes.c_int32
_SIZE = ctypes.c_size_t
_LOG_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)

# name: (result, arguments). Without these ctypes would cut pointers to 32 bits.
_PROTOTYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (_LOG_CALLBACK, _P)),
    "llama_model_default_params": (_ModelParams, ()),
    "llama_context_default_params": (_ContextParams, ()),
    "llama_model_load_from_file": (_P, (ctypes.c_char_p, _ModelParams)),
    "llama_model_free": (None, (_P,)),
    "llama_model_get_vocab": (_P, (_P,)),
    "llama_model_chat_template": (ctypes.c_char_p, (_P, ctypes.c_char_p)),
    "llama_model_n_ctx_train": (_I32, (_P,)),
    "llama_model_n_head_kv": (_I32, (_P,)),
    "llama_vocab_n_tokens": (_I32, (_P,)),
    "llama_vocab_is_eog": (ctypes.c_bool, (_P, _I32)),
    "llama_vocab_is_control": (ctypes.c_bool, (_P, _I32)),
    "llama_vocab_bos": (_I32, (_P,)),
    "llama_vocab_eos": (_I32, (_P,)),
    "llama_vocab_get_add_bos": (ctypes.c_bool, (_P,)),
    "llama_tokenize": (
        _I32,
        (_P, ctypes.c_char_p, _I32, _P, _I32, ctypes.c_bool, ctypes.c_bool),
    ),
    "llama_token_to_piece": (_I32, (_P, _I32, _P, _I32, _I32, ctypes.c_bool)),
    "llama_init_from_model": (_P, (_P, _ContextParams)),
    "llama_free": (None, (_P,)),
    "llama_n_ctx_seq": (ctypes.c_uint32, (_P,)),
    "llama_get_memory": (_P, (_P,)),
    "llama_memory_seq_rm": (ctypes.c_bool, (_P, _I32, _I32, _I32)),
    "llama_memory_seq_cp": (None, (_P, _I32, _I32, _I32, _I32)),
    "llama_batch_init": (_Batch, (_I32, _I32, _I32)),
    "llama_batch_free": (None, (_Batch,)),
    "llama_decode": (_I32, (_P, _Batch)),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), (_P, _I32)),
    "llama_state_seq_get_size": (_SIZE, (_P, _I32)),
    "llama_state_seq_get_data": (_SIZE, (_P, _P, _SIZE, _I32)),
    "llama_state_seq_set_data": (_SIZE, (_P, _P, _SIZE, _I32)),
}


def _ignore(level: int, text: bytes, data: object) -> None:
    """Swallow llama.cpp's log: a page of tensors at every start."""


# A global, because C keeps its address.
_QUIET = _LOG_CALLBACK(_ignore)


def _check(struct: ctypes.Structure, expected: dict[str, object]) -> None:
    for field in struct._fields_:
        name = field[0]
        got = getattr(struct, name)
        if got != expected[name]:
            raise LayoutChanged(
                f"llama.cpp reports {name} = {got!r} in {type(struct).__name__[1:]} where {expected[name]!r} "
                "was expected: its structs have changed; install the xllamacpp version that pointsman[engine] pins"
            )


def load_library(path: str | os.PathLike[str] | None = None) -> ctypes.CDLL:
    """The C library, its prototypes declared and its struct layout checked. `path` None: the xllamacpp wheel's.

    Raises:
        LayoutChanged: a default parameter is not where or what it should be, or a function is missing.
        ImportError: xllamacpp is not installed.
    """
    if path is None:
        import xllamacpp.xllamacpp

        path = xllamacpp.xllamacpp.__file__
    library = ctypes.CDLL(os.fspath(path))
    for name, (result, arguments) in _PROTOTYPES.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise LayoutChanged(f"llama.cpp has no function {name}") from None
        function.restype = result
        function.argtypes = arguments
    _check(library.llama_model_default_params(), _MODEL_DEFAULTS)
    _check(library.llama_context_default_params(), _CONTEXT_DEFAULTS)
    library.llama_log_set(_QUIET, None)
    library.llama_backend_init()
    return library


class Row(NamedTuple):
    """One token of a batch: `token` at `position` of `sequence`; `output` asks for its logits."""

    sequence: int
    position: int
    token: int
    output: bool


class Model:
    """A GGUF file in memory, with its vocabulary.

    Raises:
        LlamaError: the file is missing or is no model that llama.cpp can run.
    """

    def __init__(self, library: ctypes.CDLL, path: Path) -> None:
        self.library = library
        self._vocab: int | None = None
        self.handle: int | None = None
        parameters = library.llama_model_default_params()
        self.handle = library.llama_model_load_from_file(os.fsencode(path), parameters)
        if not self.handle:
            raise LlamaError(f"llama.cpp cannot load {path}")
        self._vocab = library.llama_model_get_vocab(self.handle)
        self.n_vocab: int = library.llama_vocab_n_tokens(self._vocab)
        self.n_ctx_train: int = library.llama_model_n_ctx_train(self.handle)
        self.kv_heads: int = library.llama_model_n_head_kv(self.handle)
        template = library.llama_model_chat_template(self.handle, None)
        self.chat_template: str | None = template.decode() if template else None
        self.bos: int = library.llama_vocab_bos(self._vocab)
        self.eos: int = library.llama_vocab_eos(self._vocab)
        self.end_of_generation = frozenset(
            token for token in range(self.n_vocab) if library.llama_vocab_is_eog(self._vocab, token)
        )

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """The token ids of `text`; `add_special` prepends what the model wants (BOS), `parse_special` reads `<|…|>`."""
        raw = text.encode()
        room = len(raw) + 8
        ids = (ctypes.c_int32 * room)()
        count = self.library.llama_tokenize(
            self._vocab, raw, len(raw), ids, room, add_special, parse_special
        )
        if count < 0:
            raise LlamaError(f"llama_tokenize needs room for {-count} tokens, {room} were given")
        return ids[:count]

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token, possibly a part of a UTF-8 character; control tokens are empty unless `special`."""
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            count = self.library.llama_token_to_piece(self._vocab, token, buffer, room, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            room = -count

    def close(self) -> None:
        """Give the memory back; every context must be closed before."""
        if self.handle:
            self.library.llama_model_free(self.handle)
            self.handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Context:
    """The KV cache and the compute buffers of one worker: `sequences` streams of `context` tokens each.

    Every sequence has cells of its own (`kv_unified` off) and flash attention is off. With shared cells the place of a
    token in the cache, and so the order in which attention sums, would depend on what else is running.

    Raises:
        LlamaError: there is not enough memory.
    """

    def __init__(
        self,
        model: Model,
        *,
        context: int,
        sequences: int,
        threads: int = 1,
        batch: int = 64,
    ) -> None:
        self.model = model
        self.library = library = model.library
        self.capacity = max(batch, sequences)
        parameters = library.llama_context_default_params()
        parameters.n_ctx = context * sequences
        parameters.n_batch = parameters.n_ubatch = self.capacity
        parameters.n_seq_max = sequences
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.flash_attn_type = 0
        parameters.kv_unified = False
        self.handle: int | None = library.llama_init_from_model(model.handle, parameters)
        if not self.handle:
            raise LlamaError(f"no memory for {sequences} sequences of {context} tokens")
        self.n_ctx_seq: int = library.llama_n_ctx_seq(self.handle)
        self._memory = library.llama_get_memory(self.handle)
        self._batch = library.llama_batch_init(self.capacity, 0, 1)

    def decode(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Run one batch; the logits of its `output` rows, in order, shape (outputs, n_vocab), a copy.

        Raises:
            ValueError: more rows than a batch holds.
            LlamaError: llama.cpp refused the batch, or computation failed.
        """
        if not 0 < len(rows) <= self.capacity:
            raise ValueError(f"a batch holds 1 to {self.capacity} rows, not {len(rows)}")
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, row in enumerate(rows):
            batch.token[i] = row.token
            batch.pos[i] = row.position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = row.sequence
            batch.logits[i] = row.output
        status = self.library.llama_decode(self.handle, batch)
        if status != 0:
            raise LlamaError(f"llama_decode answered {status} for a batch of {len(rows)} tokens")
        wanted = [i for i, row in enumerate(rows) if row.output]
        logits = np.empty((len(wanted), self.model.n_vocab), np.float32)
        for line, i in zip(logits, wanted, strict=True):
            pointer = self.library.llama_get_logits_ith(self.handle, i)
            if not pointer:
                raise LlamaError(f"llama.cpp has no logits for row {i}")
            ctypes.memmove(line.ctypes.data, pointer, line.nbytes)
        return logits

    def forget(self, sequence: int, start: int = 0) -> None:
        """Drop the tokens of `sequence` from position `start` on."""
        if not self.library.llama_memory_seq_rm(self._memory, sequence, start, -1):
            raise LlamaError(f"cannot cut sequence {sequence} at {start}")

    def copy(self, source: int, target: int) -> None:
        """Make `target` a copy of the whole of `source` (llama.cpp copies parts only between shared cells)."""
        self.library.llama_memory_seq_cp(self._memory, source, target, -1, -1)

    def export(self, sequence: int) -> bytes:
        """The KV state of `sequence`, to be given to `load` of a context of the same model, here or elsewhere."""
        size = self.library.llama_state_seq_get_size(self.handle, sequence)
        buffer = ctypes.create_string_buffer(size)
        written = self.library.llama_state_seq_get_data(self.handle, buffer, size, sequence)
        return buffer.raw[:written]

    def load(self, sequence: int, state: bytes) -> None:
        """Replace `sequence` by an exported state.

        Raises:
            LlamaError: the state is of another model, broken, or does not fit.
        """
        self.forget(sequence)
        read = self.library.llama_state_seq_set_data(self.handle, state, len(state), sequence)
        if read != len(state):
            raise LlamaError("the KV state cannot be loaded")

    def close(self) -> None:
        """Give the memory back."""
        if self.handle:
            self.library.llama_batch_free(self._batch)
            self.library.llama_free(self.handle)
            self.handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
