"""The contract between the scheduler and the models: what goes into a step and what comes out.

A step is a set of token rows. Rows of one sequence are adjacent and in order. There are no prefill and decode
phases: a sequence has one row in a step or two thousand, and only `logit_rows` reach the LM head.

Everything is numpy on the host; a runner on another device copies what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from models.config import ModelConfig
from models.sampling import SamplingBatch

U8 = npt.NDArray[np.uint8]
I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work. T token rows, S sequences, G layer groups, L logit rows.

    Sequence s owns rows query_starts[s] .. query_starts[s+1]. After the step it holds `lengths[s]` keys, its own n rows
    included: row j of n is written at slot `lengths[s] - n + j` of its page table and attends to slots 0 .. that one.
    Slot i lies in page `page_tables[g][s, i // page_size]`, at offset `i % page_size`.
    """

    token_ids: I32  # [T]
    positions: I32  # [T] logical positions, for RoPE
    query_starts: I32  # [S + 1]
    lengths: I32  # [S] physical length after this step
    page_tables: tuple[I32, ...]  # per layer group: [S, at least ceil(max length / page_size)], C-contiguous rows
    copies: tuple[I32, ...]  # per layer group: [C, 2] pages (source, destination) copied before any row is written
    logit_rows: I32  # [L] indices into the T rows; a row may appear several times (the forks of n > 1)
    sampling: SamplingBatch  # L rows


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the L logit rows gave.

    `logprobs` are natural logs of the distribution after penalties and logit_bias and before temperature and filters.
    A row whose logits are not finite has token -1.
    """

    tokens: I32  # [L] the sampled token, or the given target
    logprobs: F32 | None  # [L] of that token; None when no row asked
    top_ids: I32 | None  # [L, K] most likely first, K the largest number any row asked for
    top_logprobs: F32 | None  # [L, K]


@runtime_checkable
class StartingRunner(Protocol):
    """A runner that has threads of its own, so that its caller need not lend it one."""

    def start(self, batch: Batch, descriptor: int) -> Callable[[], StepOutput]:
        """Begin a step; when it is done, the eventfd `descriptor` counts one up and the function gives the output.

        The function must be kept until then. No other step may be run or started before."""


class Runner(Protocol):
    """A loaded model that can run steps. One thread at a time calls it."""

    config: ModelConfig

    def page_bytes(self, page_size: int) -> int:
        """Bytes of keys and values of one page over all layers."""

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Reserve the KV memory. Called once, before the first step."""

    def read_page(self, page: int, out: U8) -> None:
        """Copy one page of every layer into `out` [page_bytes], in an order that only `write_page` knows.

        Both are called between steps, and are done when the next step begins.
        """

    def write_page(self, page: int, data: U8) -> None:
        """Fill a page with what `read_page` gave, bit for bit."""

    def run(self, batch: Batch) -> StepOutput:
        """Run one step and sample."""
