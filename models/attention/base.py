"""What the decoder asks of an attention backend.

A backend owns the KV memory of every layer, and with it the arrangement of numbers inside a page; everyone else knows
pages by their ids alone. One thread at a time calls it: `begin` once a step, then `attend` once a layer, in order.
"""

from __future__ import annotations

from typing import Protocol

import torch

from models.base import U8, Batch


class AttentionBackend(Protocol):
    """T query rows of S sequences, as in `models.base.Batch`."""

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page's keys and values over all layers."""

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Take the memory, once."""

    def read_page(self, page: int, out: U8) -> None:
        """See `models.base.Runner`."""

    def write_page(self, page: int, data: U8) -> None:
        """See `models.base.Runner`."""

    def begin(self, batch: Batch) -> None:
        """Start a step: copy the pages it asks for, and note where its rows are written and what they may see."""

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Write this layer's keys and values, then attend.

        query [T, heads, head_dim], key and value [T, kv_heads, head_dim], all after RoPE. Returns [T, heads, head_dim].
        """
