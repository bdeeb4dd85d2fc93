"""Write a GGUF file of Q4_1 weights anew as Q4_0, which llama.cpp computes twice as fast on a CPU.

    python bench/requantize.py SmolLM2-135M-Instruct.Q4_1.gguf SmolLM2-135M-Instruct.Q4_0.gguf

For measurements that need speed and not quality: the weights are rounded twice. Everything else is copied. It needs the
package gguf.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

__all__ = ["main", "requantize"]

ARCHITECTURE = "general.architecture"
SLOW, FAST = GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q4_0


def requantize(source: Path, target: Path) -> int:
    """Write `target`, and return how many tensors were changed."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields[ARCHITECTURE].contents())
    for field in reader.fields.values():
        # The writer says itself what kind of file and of model it is.
        if field.name != ARCHITECTURE and not field.name.startswith("GGUF."):
            kind = field.types[0]
            of = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, of)
    changed = 0
    for tensor in reader.tensors:
        data, weights = tensor.data, tensor.tensor_type
        if weights == SLOW:
            data, weights = quants.quantize(quants.dequantize(data, weights), FAST), FAST
            changed += 1
        writer.add_tensor(tensor.name, data, raw_dtype=weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return changed


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says."""
    source, target = map(Path, arguments)
    print(f"{requantize(source, target)} tensors are {FAST.name} now")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
