"""The KV memory of the CPU kernels, and what everyone who runs native attention does with it.

One arena, two halves a layer. One thread at a time uses it.
"""

from __future__ import annotations

from typing import Any, Literal

from models.base import U8
from models.config import ModelConfig
from models.cpu import library as lib
from models.cpu.memory import Arena, aligned

KVDtype = Literal["bfloat16", "float32", "int8"]
KV_FORMATS: dict[str, int] = {"bfloat16": 0, "float32": 1, "int8": 2}  # KVFormat of decoder.cpp
TILE = 16  # tokens that attention.h keeps together; a page is a whole number of tiles


class NativePages:
    """The engine of threads, the model's structure and the pages it points at: the part of a runner or of an attention
    backend that the native ones share. `model` and `layers` are filled by the heirs, before `allocate`.
    """

    model: lib.Model
    layers: Any  # an array of lib.Layer
    memory: Arena
    halves: U8  # [2 * layers, pages, bytes]

    def __init__(self, config: ModelConfig, *, kv_dtype: KVDtype, threads: int) -> None:
        self.library = lib.load_library()
        self.config, self.kv_dtype = config, kv_dtype
        self.engine = self.library.octavo_engine(threads)
        self.host: NativePages | None = None  # whose threads these are

    def __del__(self) -> None:
        if getattr(self, "engine", None) and self.host is None:
            self.library.octavo_engine_free(self.engine)

    def join(self, host: NativePages, *, pages: bool) -> None:
        """Compute with the host's threads and, with `pages`, in its allocated KV memory instead of an own one.

        Their steps never overlap. To share pages both need one shape and type of keys and values.
        """
        self.library.octavo_engine_free(self.engine)
        self.host, self.engine = host, host.engine
        if pages:
            self.model.page_size, self.memory, self.halves = host.model.page_size, host.memory, host.halves
            for layer, theirs in zip(self.layers, host.layers, strict=True):
                layer.keys, layer.values = theirs.keys, theirs.values

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page over all layers."""
        c = self.config
        head = {"float32": 4 * c.head_dim, "bfloat16": 2 * c.head_dim, "int8": c.head_dim + 4}[self.kv_dtype]
        return c.num_layers * 2 * c.num_kv_heads * page_size * head

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Take the memory and point the layers' structures at it. Raises ValueError unless tiles fill a page."""
        if page_size % TILE:
            raise ValueError(f"the page size must be a multiple of {TILE} tokens on the CPU, not {page_size}")
        self.model.page_size = page_size
        half = aligned(num_pages * self.page_bytes(page_size) // (2 * self.config.num_layers))
        self.memory = Arena(2 * half * self.config.num_layers)
        for layer in self.layers:
            layer.keys, layer.values = self.memory.take(half).ctypes.data, self.memory.take(half).ctypes.data
        halves = self.memory.memory[: 2 * half * self.config.num_layers].reshape(-1, half)
        run = self.page_bytes(page_size) // len(halves)
        self.halves = halves[:, : num_pages * run].reshape(len(halves), num_pages, run)  # a view

    def read_page(self, page: int, out: U8) -> None:
        out.reshape(len(self.halves), -1)[:] = self.halves[:, page]

    def write_page(self, page: int, data: U8) -> None:
        self.halves[:, page] = data.reshape(len(self.halves), -1)
