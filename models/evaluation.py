"""How close each weights format comes to exact arithmetic on the same weights, measured on plain English.

For every token of a text: the Kullback-Leibler divergence of the format's distribution from the reference's, whether
both put the same token first, and the likelihood of the token that follows. The reference is float32 arithmetic on
the dequantised weights, by the kernels here or by transformers. The text is cut into windows that are read one by one.

Owner: whoever asks, in one thread; no server runs beside it. Knows tokens and logits, not what the text says.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from models.base import F32, I32
from models.errors import ModelError
from models.loading.checkpoint import Checkpoint
from models.loading.source import Source
from models.plain_batch import plain_batch, plain_runner

if TYPE_CHECKING:
    from models.cpu.weights import WeightFormat

F64 = npt.NDArray[np.float64]
Logits = Callable[[I32], F32]  # tokens [n] of one window -> logits [n, vocab]

FORMATS: tuple[WeightFormat, ...] = ("float32", "bfloat16", "stored", "int8", "int4")
TEXT = Path(__file__).with_name("english.txt")
PAGE_SIZE = 16
SLICE = 256  # rows in double precision at a time


@dataclass(frozen=True, slots=True)
class Limits:
    """What a format must keep to. Shares, not percents."""

    kl_mean: float
    agreement: float
    perplexity_change: float  # either way


_QUANTISED = Limits(kl_mean=2e-2, agreement=0.95, perplexity_change=0.01)
LIMITS: dict[WeightFormat, Limits] = {
    "float32": Limits(1e-6, 0.999, 1e-4),
    "bfloat16": Limits(1e-2, 0.95, 0.002),
    "stored": _QUANTISED,
    "int8": _QUANTISED,
    "int4": _QUANTISED,
}


class Comparison(NamedTuple):
    """n tokens, of which m have a next one. Divergences and likelihoods in nats."""

    kl: F64  # [n] KL(reference || found)
    agrees: npt.NDArray[np.bool_]  # [n] the same token first
    surprise: F64  # [m] -ln of what the format gives the next token
    expected_surprise: F64  # [m] the same of the reference


@dataclass(frozen=True, slots=True)
class Score:
    """What a format came to over the whole text."""

    weights: WeightFormat
    tokens: int
    kl_mean: float
    kl_p99: float
    kl_max: float
    agreement: float
    perplexity: float
    reference_perplexity: float
    seconds: float  # of computing its logits

    @property
    def perplexity_change(self) -> float:
        """Relative to the reference: 0.01 is one percent more."""
        return self.perplexity / self.reference_perplexity - 1

    @property
    def misses(self) -> tuple[str, ...]:
        """The limits it does not keep to."""
        limits = LIMITS[self.weights]
        kept = {
            f"KL above {limits.kl_mean:g}": self.kl_mean <= limits.kl_mean,
            f"agreement below {limits.agreement:.1%}": self.agreement >= limits.agreement,
            f"perplexity changed by more than {limits.perplexity_change:.2%}": abs(self.perplexity_change)
            <= limits.perplexity_change,
        }
        return tuple(miss for miss, within in kept.items() if not within)


def compare(expected: F32, found: F32, following: I32) -> Comparison:
    """Two [n, vocab] arrays of logits for the same tokens; `following` [n] is what came next, -1 where nothing did."""
    p, q = log_softmax(expected), log_softmax(found)
    row = np.flatnonzero(following >= 0)
    return Comparison(
        kl=(np.exp(p) * (p - q)).sum(-1),
        agrees=expected.argmax(-1) == found.argmax(-1),
        surprise=-q[row, following[row]],
        expected_surprise=-p[row, following[row]],
    )


def log_softmax(logits: F32) -> F64:
    """ln(softmax) of each row, in double precision: divergences near 1e-11 would drown in single."""
    import torch  # several times numpy's speed on an array of this size

    return torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy()


def summarise(weights: WeightFormat, parts: Sequence[Comparison], seconds: float) -> Score:
    """Means over every token of every window; perplexity is exp of the mean surprise."""
    kl, agrees, surprise, expected_surprise = map(np.concatenate, zip(*parts, strict=True))
    return Score(
        weights=weights,
        tokens=len(kl),
        kl_mean=float(kl.mean()),
        kl_p99=float(np.quantile(kl, 0.99)),
        kl_max=float(kl.max()),
        agreement=float(agrees.mean()),
        perplexity=math.exp(surprise.mean()),
        reference_perplexity=math.exp(expected_surprise.mean()),
        seconds=seconds,
    )


def windows(tokens: Sequence[int], count: int, length: int) -> list[I32]:
    """The first `count` tokens in runs of `length`, the last one shorter. Raises ValueError where there are fewer
    than two tokens."""
    taken = np.asarray(tokens[:count], np.int32)
    if len(taken) < 2 or length < 2:
        raise ValueError("a text of two tokens at least, in windows of two at least")
    cut = [taken[first : first + length] for first in range(0, len(taken), length)]
    return [window for window in cut if len(window) > 1]


def evaluate(
    reference: Callable[[], Logits],
    candidates: Iterable[tuple[WeightFormat, Callable[[], Logits]]],
    texts: Sequence[I32],
) -> Iterator[Score]:
    """One score a candidate. Models are made one at a time; the reference's logits wait in a temporary file."""
    with tempfile.TemporaryFile() as file:
        logits_of = reference()
        for text in texts:
            file.write(logits_of(text).tobytes())
        file.flush()
        vocab = file.tell() // 4 // sum(len(text) for text in texts)
        del logits_of
        for weights, make in candidates:
            yield _score(weights, make(), np.memmap(file, np.float32, "r").reshape(-1, vocab), texts)


def _score(weights: WeightFormat, logits_of: Logits, expected: F32, texts: Sequence[I32]) -> Score:
    parts: list[Comparison] = []
    seconds = 0.0
    for text in texts:
        began = time.perf_counter()
        found = logits_of(text)
        seconds += time.perf_counter() - began
        following = np.append(text[1:], np.int32(-1))
        for first in range(0, len(text), SLICE):
            rows = slice(first, min(first + SLICE, len(text)))
            parts.append(compare(np.array(expected[rows]), found[rows], following[rows]))
        expected = expected[len(text) :]
    return summarise(weights, parts, seconds)


def native(checkpoint: Checkpoint, weights: WeightFormat, threads: int, length: int) -> Logits:
    """The CPU kernels, for windows of up to `length` tokens. Raises KernelError where they cannot run."""
    runner = plain_runner(checkpoint, weights, threads, length)
    pages = -(-length // PAGE_SIZE)
    runner.allocate(pages, PAGE_SIZE)
    table = np.arange(pages, dtype=np.int32)[None]

    def logits(tokens: I32) -> F32:
        rows = np.arange(len(tokens), dtype=np.int32)
        return runner.logits(plain_batch(tokens, table, starts=[0], counts=[len(tokens)], logit_rows=rows))

    return logits


def transformers(source: Source, threads: int) -> Logits:
    """transformers' own implementation in float32. Raises ModelError when the file cannot be read that way."""
    import warnings

    import torch
    from transformers import AutoModelForCausalLM, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(threads)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    options: dict[str, object] = {"dtype": torch.float32}
    folder = source.path
    if source.kind == "gguf":
        folder = source.path.parent
        options |= {"gguf_file": source.path.name, "quantization_config": GgufConfig(dequantize=True)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the way the file is loaded, which was asked for
            model = AutoModelForCausalLM.from_pretrained(folder, **options)
    except (ImportError, OSError, ValueError) as error:
        raise ModelError(f"transformers cannot load {source.path}: {str(error).strip().splitlines()[0]}") from None

    def logits(tokens: I32) -> F32:
        with torch.inference_mode():
            found: F32 = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].float().numpy()
        return found

    return logits
