"""Write a GGUF file's weights as a bfloat16 Hugging Face folder, for servers that read nothing else.

    python -m loadtest.peers.export FILE.gguf FOLDER

The numbers are those of the file, dequantised by transformers, which needs the package accelerate for it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str]) -> None:
    """Write the folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    file, folder = map(Path, arguments)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # what is written is not quantised
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
