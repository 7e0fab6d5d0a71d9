"""OpenVINO GenAI's continuous batching driven in process, in that package's virtual environment.

    echo SEED:KIND:REQUESTS:CONCURRENCY | python -m loadtest.peers.openvino MODEL KV_GIB

Prints {"ready_seconds": ...}, and then for each line that names a set one line of JSON: the fields of `Figures`. It has
no HTTP, JSON or streaming to pay for, which is to its advantage. Knows nothing of Octavo.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loadtest.figures import Answer, summarise
from loadtest.workloads import Prompt, make


@dataclass(slots=True)
class Live:
    """A request in the pipeline."""

    handle: Any
    answer: Answer
    wanted: int


def main(arguments: Sequence[str]) -> None:
    """Drive the sets as they are asked for."""
    import openvino_genai

    model, kv_gib = arguments
    began = time.perf_counter()
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.cache_size = int(kv_gib)
    scheduling.enable_prefix_caching = True
    scheduling.max_num_batched_tokens = 2048
    scheduling.max_num_seqs = 64
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduling, "CPU", {})
    print(json.dumps({"ready_seconds": time.perf_counter() - began}), flush=True)
    number = 0
    for run in sys.stdin:
        seed, kind, requests, concurrency = run.strip().split(":")
        prompts = list(make(kind, int(requests), int(seed)))
        answers, seconds = drive(openvino_genai, pipeline, prompts, int(concurrency), number)
        number += len(prompts)
        figures = summarise(kind, int(concurrency), answers, seconds)
        print(json.dumps(asdict(figures)), flush=True)


def drive(
    library: Any, pipeline: Any, prompts: Sequence[Prompt], concurrency: int, first_number: int
) -> tuple[list[Answer], float]:
    """Every prompt, at most `concurrency` at a time, greedy and to the full length; and the seconds it all took."""
    tokenizer = pipeline.get_tokenizer()
    lengths = [int(tokenizer.encode(prompt.prompt).input_ids.shape[1]) for prompt in prompts]
    live: list[Live] = []
    answers: list[Answer] = []
    began = time.perf_counter()
    while live or len(answers) < len(prompts):
        while len(answers) < len(prompts) and len(live) < concurrency:
            index = len(answers)
            handle = pipeline.add_request(
                first_number + index, prompts[index].prompt, _greedy(library, prompts[index].max_tokens)
            )
            answers.append(Answer(time.perf_counter(), status=200, prompt_tokens=lengths[index]))
            live.append(Live(handle, answers[-1], prompts[index].max_tokens))
        pipeline.step()
        now = time.perf_counter()
        for request in live:
            _read(request, now)
        live = [request for request in live if request.answer.completion_tokens < request.wanted]
    return answers, time.perf_counter() - began


def _greedy(library: Any, max_tokens: int) -> Any:
    config = library.GenerationConfig()
    config.max_new_tokens = max_tokens
    config.do_sample = False
    config.ignore_eos = True
    config.apply_chat_template = False
    return config


def _read(request: Live, now: float) -> None:
    """Note the tokens that came with this step."""
    while request.handle.can_read():
        for output in request.handle.read().values():
            if output.generated_ids:
                request.answer.stamps.append(now)
                request.answer.completion_tokens += len(output.generated_ids)


if __name__ == "__main__":
    main(sys.argv[1:])
