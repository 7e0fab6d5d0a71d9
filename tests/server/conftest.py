"""A real server on a real socket, over the real engine, with a model made of a table and a hash.

The model reads its tokens back through the page tables. When they begin with a scripted prompt it continues the script
and then ends; otherwise its next token is a hash of all it has read, its seed and the position.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import uvicorn
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvstore.store import KVStore
from models.base import Batch, StepOutput
from models.config import ModelConfig, RopeConfig
from models.sampling_state import SamplingState
from scheduler.engine import Engine
from scheduler.limits import Limits
from server.app import create_app
from server.connection import Connection
from server.daemon import KEEP_ALIVE_SECONDS
from server.keys import KeyRing
from server.metrics import Metrics
from server.protocol.checks import ServerLimits
from server.state import ServerState
from server.structured.compiler import GrammarCompiler, GrammarLimits
from server.structured.vocabulary import Vocabulary
from server.tokenize import Tokenizing

MODEL = "octavo/test-model"
ALIAS = "test"
CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello world, how are you today? I am fine, thank you very much.",
    "One two three four five six seven eight nine ten. Yes and no. Stop here, please; and then go on again.",
]
TEMPLATE = (
    "{%- if messages[0]['role'] == 'assistant' %}{{ raise_exception('Conversations begin with the user.') }}{% endif %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if documents %}{{ '<|im_start|>documents\n' }}"
    "{%- for document in documents %}{{ document['text'] }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{%- if mood %}{{ '<|im_start|>mood ' + mood + '<|im_end|>\n' }}{% endif %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tokenizer() -> Tokenizer:
    """Byte-level BPE of a few hundred tokens, so that most characters beyond ASCII are spread over several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")],
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


TOKENIZER = build_tokenizer()
TOKENS = TOKENIZER.get_vocab_size(with_added_tokens=True)
VOCAB = TOKENS + 8  # some padding, as real embeddings have
EOS = TOKENIZER.token_to_id("<|im_end|>")
MASK = (1 << 64) - 1
BESIDE = Path(__file__).parents[3] / "shared" / "openai" / "openapi.json"


def mix(x: int) -> int:
    x &= MASK
    x = ((x ^ (x >> 31)) * 0x7FB5D329728EA185) & MASK
    return x ^ (x >> 29)


def allowed_of(sampling: Any, row: int) -> set[int] | None:
    """The tokens that a row's mask allows and no bias forbids; None without a mask."""
    if sampling.mask is None or sampling.mask_row[row] < 0:
        return None
    bits = np.unpackbits(sampling.mask[sampling.mask_row[row]].view(np.uint8), bitorder="little")
    allowed = set(np.flatnonzero(bits[:VOCAB]).tolist())
    if sampling.bias_row is not None:
        allowed -= set(sampling.bias_token[(sampling.bias_row == row) & np.isneginf(sampling.bias_value)].tolist())
    return allowed


class ScriptedRunner:
    """A model that says what it is told to."""

    def __init__(self) -> None:
        self.config = ModelConfig(
            "fake", VOCAB, 1, 1, 1, 1, 1, 1, 8192, 1e-5, RopeConfig(1e4), True, windows=(None,), eos_token_ids=(EOS,)
        )
        self.scripts: dict[tuple[int, ...], list[int]] = {}
        self.step_seconds = 0.0
        self.gate = threading.Event()  # cleared: the next step waits
        self.gate.set()
        self.broken: Exception | None = None  # raised by the next step
        self.poison: int | None = None  # a token whose sequences have no finite logits

    def page_bytes(self, page_size: int) -> int:
        return 4 * page_size

    def allocate(self, num_pages: int, page_size: int) -> None:
        self.memory = np.full((num_pages, page_size), -1, np.int64)

    def run(self, batch: Batch) -> StepOutput:
        assert self.gate.wait(30)
        time.sleep(self.step_seconds)
        if self.broken is not None:
            broken, self.broken = self.broken, None
            raise broken
        page_size = self.memory.shape[1]
        (table,), (copies,) = batch.page_tables, batch.copies
        self.memory[copies[:, 1]] = self.memory[copies[:, 0]]
        for s, length in enumerate(batch.lengths.tolist()):
            rows = slice(batch.query_starts[s], batch.query_starts[s + 1])
            slots = np.arange(length - (rows.stop - rows.start), length)
            self.memory[table[s, slots // page_size], slots % page_size] = batch.token_ids[rows]
        return self._sample(batch, table, page_size)

    def _sample(self, batch: Batch, table: np.ndarray, page_size: int) -> StepOutput:
        sampling, count = batch.sampling, len(batch.logit_rows)
        k = max(0, sampling.num_logprobs)
        tokens, logprobs = np.zeros(count, np.int32), np.zeros(count, np.float32)
        top_ids, top_logprobs = np.zeros((count, k), np.int32), np.zeros((count, k), np.float32)
        forbidden: set[tuple[int, int]] = set()
        if sampling.bias_row is not None:
            never = sampling.bias_value <= -1e5
            forbidden = set(zip(sampling.bias_row[never].tolist(), sampling.bias_token[never].tolist(), strict=True))
        for i, row in enumerate(batch.logit_rows.tolist()):
            s = int(np.searchsorted(batch.query_starts, row, side="right")) - 1
            slots = np.arange(int(batch.lengths[s]) - (int(batch.query_starts[s + 1]) - row) + 1)
            known = self.memory[table[s, slots // page_size], slots % page_size].tolist()
            target = int(sampling.target[i])
            seed = int(sampling.seed[i]) if sampling.temperature[i] else 0
            tokens[i] = target if target >= 0 else self._next(known, seed, allowed_of(sampling, i))
            while target < 0 and (i, tokens[i]) in forbidden:
                tokens[i] = (tokens[i] + 1) % VOCAB
            state = hash(tuple(known)) & MASK
            logprobs[i] = -(mix(state + int(tokens[i])) % 1000 + 1) / 100
            for j in range(k):
                top_ids[i, j], top_logprobs[i, j] = mix(state + j) % TOKENS, -(j + 1) / 8
        if sampling.num_logprobs < 0:
            return StepOutput(tokens, None, None, None)
        return StepOutput(tokens, logprobs, top_ids, top_logprobs)

    def _next(self, known: list[int], seed: int, allowed: set[int] | None) -> int:
        """The script's next token, or one by chance; under a mask, the next allowed one from there."""
        token = self._free(known, seed)
        if allowed is None or token < 0:
            return token
        return next(((token + i) % VOCAB for i in range(VOCAB) if (token + i) % VOCAB in allowed), -1)

    def _free(self, known: list[int], seed: int) -> int:
        if self.poison in known:
            return -1
        for prompt, script in self.scripts.items():
            if tuple(known[: len(prompt)]) == prompt:
                place = len(known) - len(prompt)
                return script[place] if place < len(script) else EOS
        return 2 + mix(hash(tuple(known)) + 3 * mix(seed)) % (TOKENS - 2)


class Served:
    """A running server and ways to talk to it."""

    def __init__(self, state: ServerState, runner: ScriptedRunner, loop: asyncio.AbstractEventLoop, port: int) -> None:
        self.state = state
        self.engine = state.engine
        self.runner = runner
        self.loop = loop
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.model = MODEL
        self.http = httpx.Client(base_url=self.url, timeout=20)

    def openai(self, *, strict: bool = True) -> openai.OpenAI:
        return openai.OpenAI(**self._client_options(strict))

    def async_openai(self, *, strict: bool = True) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._client_options(strict))

    def _client_options(self, strict: bool) -> dict[str, Any]:
        options: dict[str, Any] = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 20}
        return options | {"_strict_response_validation": strict}

    def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return self.http.post(path, json={"model": MODEL, **body})

    def complete(self, prompt: Any = "Hello", **body: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        response = self.post("/v1/completions", prompt=prompt, **body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def chat(self, content: Any = "Hello", **body: Any) -> dict[str, Any]:
        """A chat completion that must succeed."""
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        response = self.post("/v1/chat/completions", messages=messages, **body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def events(self, path: str = "/v1/completions", **body: Any) -> list[Any]:
        """The events of a stream, parsed strictly; the last one is "[DONE]"."""
        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        blocks = response.text.split("\n\n")
        assert blocks.pop() == "", "the last event is complete"
        events = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
        assert all(block.startswith(("data: ", ":")) and "\n" not in block for block in blocks)
        return [event if event == "[DONE]" else json.loads(event) for event in events]

    def error(self, response: httpx.Response, status: int) -> dict[str, Any]:
        """The envelope of an answer that must have this status."""
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/json"
        assert response.headers["x-request-id"]
        body = response.json()
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert isinstance(body["error"]["message"], str)
        assert 0 < len(body["error"]["message"]) <= 1000
        assert "Traceback" not in body["error"]["message"]
        return dict(body["error"])

    def metric(self, name: str, **labels: str) -> float:
        """One sample of /metrics; 0 when it is not there."""
        wanted = ",".join(f'{key}="{value}"' for key, value in labels.items())
        series = f"{name}{{{wanted}}}" if labels else name
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(series + " "):
                return float(line.rsplit(" ", 1)[1])
        return 0.0

    def wait_until(self, condition: Callable[[], bool], seconds: float = 5.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not come to that"
            time.sleep(0.005)

    def assert_baseline(self) -> None:
        """Nothing runs, nothing waits, nobody holds a page."""
        self.wait_until(lambda: not (self.engine.running or self.engine.waiting or self.engine.busy))
        assert self.engine.kv.stats().used == 0
        self.engine.kv.check_integrity()

    def script(self, prompt: str | Sequence[int], answer: str | Sequence[int]) -> list[int]:
        """What the model says after a prompt, before it ends. Returns the prompt's ids."""
        ids = list(TOKENIZER.encode(prompt).ids if isinstance(prompt, str) else prompt)
        self.runner.scripts[tuple(ids)] = list(
            TOKENIZER.encode(answer, add_special_tokens=False).ids if isinstance(answer, str) else answer
        )
        return ids

    def run(self, work: Awaitable[Any]) -> Any:
        """Run something on the server's event loop."""

        async def main() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(main(), self.loop).result(20)


@contextmanager
def serve(
    *,
    num_pages: int = 1024,
    limits: dict[str, Any] | None = None,
    server_limits: dict[str, Any] | None = None,
    template: str | None = TEMPLATE,
    tokenizer: Tokenizer = TOKENIZER,
    grammar_limits: GrammarLimits | None = None,
    metrics_options: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[Served]:
    """A server in a thread with an event loop of its own."""
    bound = socket.create_server(("127.0.0.1", 0))
    runner = ScriptedRunner()
    runner.allocate(num_pages, 8)
    ready = threading.Event()
    parts: list[Any] = []

    async def main() -> None:
        metrics = Metrics("0.0", {"weights": 0.5}, **(metrics_options or {}))
        engine_limits = Limits(
            **{"max_model_len": 512, "max_num_seqs": 32, "max_num_batched_tokens": 64} | (limits or {})
        )
        kv = KVStore(
            num_pages=num_pages,
            page_size=8,
            max_sequences=engine_limits.max_num_seqs,
            max_model_len=engine_limits.max_model_len,
        )
        sampling = SamplingState(engine_limits.max_num_seqs, VOCAB, (EOS,))
        engine = Engine(runner, kv, sampling, engine_limits, on_step=metrics.on_step)
        tokenizing = Tokenizing(
            tokenizer,
            max_model_len=engine.context_limit,
            chat_template=template,
            named_tokens={"eos_token": "<|im_end|>"},
        )
        state = ServerState(
            engine=engine,
            tokenizing=tokenizing,
            grammars=GrammarCompiler(
                partial(Vocabulary, tokenizer, tokenizing.decoding, VOCAB, (EOS,)), grammar_limits
            ),
            metrics=metrics,
            limits=ServerLimits(**{"vocab_size": VOCAB, "max_model_len": engine.context_limit} | (server_limits or {})),
            model_names=(MODEL, ALIAS),
            version="0.0",
            info={"model": MODEL},
            keys=KeyRing(options.pop("api_keys", ()), options.pop("admin_keys", ()), options.pop("key_file", None)),
            **options,
        )
        engine.start()
        config = uvicorn.Config(
            create_app(state), http=Connection, ws="none", log_config=None, access_log=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,  # longer than the client's: or it may send just as the server closes
        )  # fmt: skip
        server = uvicorn.Server(config)
        parts.extend([state, asyncio.get_running_loop(), server])
        ready.set()
        await server.serve(sockets=[bound])
        await engine.stop()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert ready.wait(20)
    state, loop, server = parts
    served = Served(state, runner, loop, bound.getsockname()[1])
    try:
        yield served
    finally:
        runner.gate.set()
        served.http.close()
        server.should_exit = True
        thread.join(20)
        bound.close()


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Served]:
    with serve() as served:
        yield served


@pytest.fixture
def server(shared_server: Served) -> Iterator[Served]:
    """The server that most tests share. Afterwards a plain request must still work, and nothing may be left over."""
    yield shared_server
    shared_server.runner.scripts.clear()
    shared_server.runner.step_seconds = 0.0
    shared_server.runner.gate.set()
    assert shared_server.complete("Hello", max_tokens=1)["usage"]["completion_tokens"] == 1
    shared_server.assert_baseline()


@pytest.fixture(scope="session")
def serving() -> Callable[..., Any]:
    """Servers with settings of their own, as a context manager."""
    return serve


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return TOKENIZER


@pytest.fixture(scope="session")
def vocab_size() -> int:
    return VOCAB


def _opened(value: Any) -> Any:
    """OpenAPI 3.0's `nullable`, which the description still uses in places, in JSON Schema's words."""
    if isinstance(value, list):
        return [_opened(item) for item in value]
    if not isinstance(value, dict):
        return value
    value = {key: _opened(item) for key, item in value.items()}
    if value.pop("nullable", False):
        return {"anyOf": [value, {"type": "null"}]}
    return value


@pytest.fixture(scope="session")
def valid() -> Callable[[str, Any], None]:
    """Says whether something is as a schema in OpenAI's published description has it, where that is at hand:
    `OCTAVO_OPENAI_SCHEMA` names the file (openapi.json of the openai-openapi repository)."""
    path = Path(os.environ.get("OCTAVO_OPENAI_SCHEMA", BESIDE))
    if not path.is_file():
        pytest.skip("OCTAVO_OPENAI_SCHEMA does not name OpenAI's openapi.json")
    description = _opened(json.loads(path.read_text(encoding="utf-8")))
    registry: Registry[Any] = Registry().with_resource("urn:openai", Resource(description, DRAFT202012))
    validators: dict[str, Draft202012Validator] = {}

    def check(name: str, value: Any) -> None:
        if name not in validators:
            reference = {"$ref": f"urn:openai#/components/schemas/{name}"}
            validators[name] = Draft202012Validator(reference, registry=registry)
        validators[name].validate(value)

    with pytest.raises(Exception, match="required"):  # it can say no
        check("CreateCompletionResponse", {"id": "x"})
    return check
