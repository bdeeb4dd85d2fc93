"""Makes a folder of safetensors out of a GGUF, as vLLM reads it. Runs in vLLM's environment, not in the project's.

transformers refuses to save a model that it read from a quantised file; a model of the same shape takes its weights.
"""

# mypy: disable-error-code="import-not-found"

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(source: Path, target: Path) -> None:
    quantised = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    del quantised.config.quantization_config
    plain = type(quantised)(quantised.config)
    plain.load_state_dict(quantised.state_dict())
    plain.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
