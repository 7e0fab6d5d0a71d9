"""transformers' own answers, in the daemon's environment, where it and torch are.

python reference.py FOLDER    writes the default model's tokenizer into the folder, as transformers saves it; reads
                              [[context ids, continuation ids], ...] from stdin and writes, for each, the
                              log-probability of the continuation and whether it is the greedy one
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from models.loading.source import resolve_source


def main() -> None:
    path = resolve_source(None).path
    options: dict[str, Any] = {"gguf_file": path.name}
    if len(sys.argv) > 1:
        AutoTokenizer.from_pretrained(path.parent, **options).save_pretrained(sys.argv[1])
        return
    options |= {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, while it loads
        model = AutoModelForCausalLM.from_pretrained(path.parent, **options).eval()
    answers = []
    for context, continuation in json.load(sys.stdin):
        with torch.no_grad():
            logits = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
        wanted = torch.tensor(continuation)
        scores = torch.log_softmax(logits.double(), -1).gather(1, wanted[:, None])
        answers.append([scores.sum().item(), bool((logits.argmax(-1) == wanted).all())])
    json.dump(answers, sys.stdout)


main()
