"""What the Triton kernels compute, and that a row's bits depend on that row alone: `test_triton.py` runs this file in a
process of its own, under Triton's interpreter (which must be chosen before triton is first imported) or on a GPU."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.steps import Piece, step
from transformers import LlamaConfig, LlamaForCausalLM

from models import decoder
from models.build import build_runner
from models.config import ModelConfig, RopeConfig
from models.loading.checkpoint import open_checkpoint
from models.loading.source import resolve_source
from models.torch_attention import TorchAttention
from models.torch_runner import TorchRunner
from models.triton import attention
from models.triton.attention import TritonAttention
from models.triton.operators import TritonLinear, rms_norm

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
ON_GPU = DEVICE.type == "cuda"
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
DTYPES = sorted(TOLERANCE, key=str)
FACTORS = [torch.float32, torch.float16, *[torch.bfloat16] * ON_GPU]  # the interpreter multiplies no bfloat16 matrices
if not ON_GPU:
    attention.KEY_BLOCK = 16  # the interpreter takes milliseconds a program: several blocks of few keys
LENGTHS = [1, 16, 17, 45]
LONG = 6 if ON_GPU else 1  # times these lengths


def normal(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Within what `dtype` resolves, relative to the largest number."""
    assert found.dtype == dtype
    assert found.shape == expected.shape
    return bool((found.float() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max())


# --- what they compute


@pytest.mark.parametrize("dtype", FACTORS, ids=str)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 5, 3), (7, 64, 64), (65, 130, 67), (130, 63, 129)])
def test_linear_is_the_matrix_product(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    x, weight = normal(rows, inputs, seed=1, dtype=dtype), normal(outputs, inputs, seed=2, dtype=dtype)
    bias = normal(outputs, seed=3, dtype=dtype)
    expected = x.float() @ weight.float().T
    assert close(TritonLinear(weight, None)(x), expected, dtype)
    assert close(TritonLinear(weight, bias)(x), expected + bias.float(), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 5), (6, 64), (3, 2, 80), (4, 1, 33)])
def test_rms_norm_is_that_of_the_decoder(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    wide = normal(*shape[:-1], 2 * shape[-1], seed=4, dtype=dtype)
    weight = normal(shape[-1], seed=5, dtype=dtype)
    for x in (wide[..., : shape[-1]], wide[..., shape[-1] :]):  # not contiguous, as q and k are
        assert close(rms_norm(x, weight, 1e-5), decoder.rms_norm(x.float(), weight.float(), 1e-5), dtype)


def config(heads: int, kv_heads: int, dim: int, window: int | None = None) -> ModelConfig:
    return ModelConfig(
        architecture="llama", vocab_size=64, hidden_size=64, intermediate_size=64, num_layers=1, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=dim, max_position=512, norm_eps=1e-5, rope=RopeConfig(1e4),
        tie_embeddings=True, windows=(window,),
    )  # fmt: skip


def attend(
    backend: TorchAttention, page_size: int, lengths: list[int], chunks: list[list[int]], seed: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """What every row [length, heads, dim] of sequences of these lengths attends to, page tables shuffled by `seed`.

    Step i computes `chunks[i][s]` rows of sequence s. A sequence's rows are the same whatever else is asked for.
    """
    c = backend.config
    data = [
        [normal(n, h, c.head_dim, seed=n, dtype=dtype) for h in (c.num_heads, c.num_kv_heads, c.num_kv_heads)]
        for n in lengths
    ]
    pages = list(range(sum(-(-n // page_size) for n in lengths) + 3))
    random.Random(seed).shuffle(pages)
    tables = [[pages.pop() for _ in range(-(-n // page_size))] for n in lengths]
    backend.allocate(len(pages) + sum(map(len, tables)), page_size)
    backend.whole.fill_(torch.nan)  # what no row has written must not be read
    done, rows = [0] * len(lengths), [[] for _ in lengths]  # type: list[int], list[list[torch.Tensor]]
    for counts in chunks:
        live = [s for s, count in enumerate(counts) if count]
        backend.begin(step([Piece(range(counts[s]), tables[s], done[s]) for s in live]))
        parts = [[part[done[s] : done[s] + counts[s]] for part in data[s]] for s in live]
        out = backend.attend(0, *(torch.cat(one) for one in zip(*parts, strict=True)))
        for s, part in zip(live, out.split([counts[s] for s in live]), strict=True):
            rows[s].append(part)
            done[s] += counts[s]
    assert done == lengths
    return [torch.cat(one) for one in rows]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window", "page_size"),
    [(6, 2, 24, None, 5), (6, 2, 24, 20, 16), (2, 2, 16, 1, 64), (17, 1, 8, None, 16), (17, 1, 80, 33, 7)],
)
def test_attention_is_that_of_the_reference(
    heads: int, kv_heads: int, dim: int, window: int | None, page_size: int
) -> None:
    shape, dtype = config(heads, kv_heads, dim, window), torch.float32
    chunks = [[1, 9, 12, 44], [0, 7, 5, 1]]
    found = attend(TritonAttention(shape, DEVICE, dtype), page_size, LENGTHS, chunks, 1, dtype)
    # In one step and one page each: another way to the same numbers.
    expected = attend(TorchAttention(shape, DEVICE, dtype), 256, LENGTHS, [LENGTHS], 2, dtype)
    assert all(close(a, b, dtype) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        *[(torch.bfloat16, torch.bfloat16)] * ON_GPU,
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ],
    ids=str,
)
def test_pages_may_be_of_another_dtype_than_queries(dtype: torch.dtype, kept: torch.dtype) -> None:
    shape = config(6, 2, 24)
    found = attend(TritonAttention(shape, DEVICE, kept), 16, [20], [[20]], 1, dtype)
    [expected] = attend(TorchAttention(shape, DEVICE, kept), 16, [20], [[20]], 1, dtype)
    assert close(found[0], expected.float(), dtype)


# --- that a row is alone


def rows_are_alone(compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, counts: list[int]) -> bool:
    """Whether row i of x gives the same bits by itself as among `counts` others, at whatever place."""
    alone = torch.cat([compute(row[None]) for row in x])
    chosen = random.Random(1)
    for count in counts:
        picked = [chosen.randrange(len(x)) for _ in range(count)]
        if not torch.equal(compute(x[picked]), alone[picked]):
            return False
    return True


COUNTS = [*range(2, 18), 64, 65, 130]


@pytest.mark.parametrize("dtype", FACTORS, ids=str)
def test_a_row_of_a_product_or_a_norm_is_the_same_among_any_others(dtype: torch.dtype) -> None:
    inputs, outputs = (4096, 1056) if ON_GPU else (200, 70)
    x, weight = normal(9, inputs, seed=6, dtype=dtype), normal(outputs, inputs, seed=7, dtype=dtype)
    assert rows_are_alone(TritonLinear(weight, weight[:, 0].contiguous()), x, COUNTS)
    assert rows_are_alone(lambda rows: rms_norm(rows, weight[0], 1e-5), x, COUNTS)


def test_the_comparison_notices_a_sum_in_another_order() -> None:
    x, weight = normal(9, 200, seed=6, dtype=torch.float32), normal(70, 200, seed=7, dtype=torch.float32)

    def split(rows: torch.Tensor) -> torch.Tensor:
        """A product that cuts its sum in two when it has few rows, as libraries do."""
        parts = [slice(0, 200)] if len(rows) > 4 else [slice(0, 100), slice(100, 200)]
        return sum(TritonLinear(weight[:, p], None)(rows[:, p]) for p in parts)  # type: ignore[return-value]

    assert not rows_are_alone(split, x, COUNTS)


@pytest.mark.parametrize(
    ("dtype", "window", "kv_heads"),
    [(torch.float32, None, 2), (torch.float16, 20, 1), *[(torch.bfloat16, None, 8)] * ON_GPU],
    ids=str,
)
def test_attention_of_a_row_is_the_same_however_its_step_was_made(
    dtype: torch.dtype, window: int | None, kv_heads: int
) -> None:
    shape = config(3 * kv_heads, kv_heads, 128 if ON_GPU else 24, window)

    def run(page_size: int, lengths: list[int], chunks: list[list[int]], seed: int) -> list[torch.Tensor]:
        lengths, chunks = [n * LONG for n in lengths], [[n * LONG for n in counts] for counts in chunks]
        return attend(TritonAttention(shape, DEVICE, dtype), page_size, lengths, chunks, seed, dtype)

    alone = {n: run(16, [n], [[n]], 1)[0] for n in LENGTHS}
    others = {
        "in chunks": (16, [45], [[1], [15], [28], [1]], 1),
        "on other pages of another size": (7, [45], [[45]], 2),
        "beside others": (16, LENGTHS, [LENGTHS], 3),
        "beside others, in chunks": (16, LENGTHS, [[0, 3, 16, 8], [1, 13, 1, 37]], 4),
        "one row at a time, beside a longer one": (64, [45, 16], [[2, 1]] * 15 + [[15, 1]], 5),
    }
    for how, (page_size, lengths, chunks, seed) in others.items():
        for n, rows in zip(lengths, run(page_size, lengths, chunks, seed), strict=True):
            assert torch.equal(rows, alone[n]), (how, n)


# --- a whole model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=150, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=6,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=256, tie_word_embeddings=False,
            attention_bias=True,
        )
    )  # fmt: skip
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * (0.1 if weight.dim() == 2 else 0.3) + ("norm" in name))
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


def runner(folder: Path, backend: str, dtype: str) -> TorchRunner:
    made = build_runner(
        open_checkpoint(resolve_source(str(folder))), device=DEVICE.type, dtype=dtype, quantization="none",
        kv_dtype=dtype, attention_backend=backend, threads=1, max_model_len=256,
    )  # fmt: skip
    assert isinstance(made, TorchRunner)
    made.allocate(40, 16)
    return made


TOKENS = np.random.default_rng(3).integers(0, 150, 40)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float16", 0.03)])
def test_a_decoder_of_these_kernels_gives_the_logits_of_the_plain_one(
    folder: Path, dtype: str, tolerance: float
) -> None:
    batch = step([Piece(TOKENS[:33], [9, 3, 17]), Piece(TOKENS[33:], [30])])
    plain, ours = (runner(folder, backend, dtype).logits(batch) for backend in ("torch", "triton"))
    assert np.abs(plain).max() > 1
    assert np.abs(ours - plain).max() < tolerance


@pytest.mark.parametrize("dtype", ["float16", *["bfloat16"] * ON_GPU])
def test_a_sequence_gives_the_same_bits_alone_and_in_a_mixed_batch(folder: Path, dtype: str) -> None:
    made = runner(folder, "triton", dtype)
    alone = made.logits(step([Piece(TOKENS, [9, 3, 17])]))
    other, pages, theirs = TOKENS[::-1].copy(), [8, 1, 6], [30, 2, 31]
    found = [
        made.logits(step([Piece(other[:13], theirs), Piece(TOKENS[:19], pages)]))[13:],
        made.logits(step([Piece(TOKENS[19:20], pages, 19), Piece(other[13:20], theirs, 13)]))[:1],
        made.logits(step([Piece(other[20:21], theirs, 20), Piece(TOKENS[20:], pages, 20)]))[1:],
    ]
    assert np.array_equal(np.concatenate(found), alone)


def test_what_is_sampled_and_its_logprobs_are_the_same_bits_too(folder: Path) -> None:
    made = runner(folder, "triton", "float32")

    def run(pieces: list[Piece], rows: list[int]) -> list[np.ndarray]:
        batch = step(pieces, logit_rows=rows)
        sampling = replace(
            batch.sampling, temperature=np.full(len(rows), 1, np.float32), top_p=np.full(len(rows), 0.9, np.float32),
            num_logprobs=3,
        )  # fmt: skip
        output = made.run(replace(batch, sampling=sampling))
        found = (output.tokens, output.logprobs, output.top_ids, output.top_logprobs)
        return [part for part in found if part is not None]

    alone = run([Piece(TOKENS, [9, 3, 17])], [39])
    beside = run([Piece(TOKENS[19::-1].copy(), [8, 1]), Piece(TOKENS, [30, 2, 31])], [3, 9, 59])
    assert len(alone) == 4
    assert all(np.array_equal(a[0], b[2]) for a, b in zip(alone, beside, strict=True))
