"""`make bench-structured`: what asking for a JSON schema costs, and whether requests without one notice.

    python -m loadtest.structured --rounds 3 --serve "--threads 4"

Each round drives the same requests four times: all without a schema, all with one, and then in two halves, of which the
second is without and with one; the figures of interest are ratios, so a round's parts follow each other. Answers are
lists that the schema lets nobody close before their full length, so every run has the same number of tokens. Let
nothing else run.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
from collections.abc import Mapping, Sequence
from statistics import median

from loadtest.driver import drive
from loadtest.figures import Answer, summarise
from loadtest.servers import Server, daemon
from loadtest.workloads import Prompt, make

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "größer", "日本"]}, "maxItems": 4},
        "address": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[0-9]{1,3} [A-Z][a-z]+$"}]},
    },
    "required": ["name", "age", "email", "tags", "address"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 400}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "people", "schema": SCHEMA, "strict": True}}}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the costs; 1 when a request failed or the answers were not of full length."""
    parser = argparse.ArgumentParser(prog="make bench-structured", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=48, help="of the set `chat`")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", default="", metavar="FLAGS", help="model and flags for the daemon")
    options = parser.parse_args(arguments)
    flags = ["--no-enable-prefix-caching", "--max-queue-delay", "inf"]  # no answer twice, none refused
    with daemon([*shlex.split(options.serve), *flags]) as server:
        rounds = [
            _round(server, list(make("chat", options.requests, 1 + number)), options.concurrency)
            for number in range(options.rounds)
        ]
    plain, kept, free, beside = (median(row[place] for row in rounds) for place in range(4))
    print(f"output tok/s   without {plain:.0f}   with a schema {kept:.0f}   {kept / plain - 1:+.1%}")
    print(f"tok/s per stream of those without   alone {free:.1f}   beside {beside:.1f}   {beside / free - 1:+.1%}")
    return 0


def _round(server: Server, prompts: list[Prompt], concurrency: int) -> tuple[float, float, float, float]:
    """Throughput without and with a schema; what a stream without one gets beside others without and with one."""

    async def run(fields: Mapping[str, object], some: list[Prompt], at_once: int) -> tuple[list[Answer], float]:
        return await drive(server.url, server.model, some, at_once, fields)

    async def beside(fields: Mapping[str, object]) -> float:
        half = concurrency // 2
        (answers, seconds), _ = await asyncio.gather(run({}, prompts[::2], half), run(fields, prompts[1::2], half))
        return 1e3 / (summarise("chat", half, _checked(answers, prompts[::2]), seconds).tpot_p50 or 1e3)

    def throughput(fields: Mapping[str, object]) -> float:
        answers, seconds = asyncio.run(run(fields, prompts, concurrency))
        return summarise("chat", concurrency, _checked(answers, prompts), seconds).output_tokens_per_second

    asyncio.run(run(FORM, prompts[:1], 1))  # compiles the grammar
    return throughput({}), throughput(FORM), asyncio.run(beside({})), asyncio.run(beside(FORM))


def _checked(answers: list[Answer], prompts: list[Prompt]) -> list[Answer]:
    for answer, prompt in zip(answers, prompts, strict=True):
        if answer.error or answer.tokens != prompt.max_tokens:
            raise SystemExit(f"an answer has {answer.tokens} of {prompt.max_tokens} tokens: {answer.error}")
    return answers


if __name__ == "__main__":
    raise SystemExit(main())
