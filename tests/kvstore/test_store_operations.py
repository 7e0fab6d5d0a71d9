"""Random operations on the store, against a shadow that knows what is written in every page.

The shadow keeps an array of token ids for the pages of each layer group, applies the drained copies and writes what a
model would write. After each step every sequence must read its own tokens through its own row, and every node of the
tree must find its path's tokens in its pages. Integrity is checked after every single operation.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvstore.node import Node
from kvstore.pool import I32, NO_PAGE
from kvstore.sequence import KVSequence
from kvstore.store import KVStore, Pin
from kvstore.tables import LayerGroup
from kvstore.tier import U8, HostTier

FULL = (LayerGroup("full"),)
SLIDING = (LayerGroup("full"), LayerGroup("sliding", window=6, num_pages=9))
MIXED = (LayerGroup("sliding", window=3), LayerGroup("full", num_pages=10), LayerGroup("other"))
ONLY_SLIDING = (LayerGroup("sliding", window=5),)
# page size, pages, sequences, longest, caching, groups, slots of a second tier
SHAPES = [
    (4, 12, 5, 64, True, FULL, 0),
    (4, 9, 6, 36, True, FULL, 40),
    (4, 10, 5, 40, True, FULL, 3),
    (1, 24, 4, 40, True, FULL, 0),
    (2, 14, 4, 40, True, FULL, 9),
    (16, 6, 4, 128, True, FULL, 0),
    (4, 14, 5, 64, True, SLIDING, 0),
    (2, 14, 4, 40, True, MIXED, 0),
    (4, 8, 4, 64, True, ONLY_SLIDING, 0),
    (4, 12, 5, 64, False, FULL, 0),
]
STEMS = ([1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 2, 1, 1, 2, 2], [2, 2, 2, 2, 1, 1, 1, 1, 2])
few_tokens = st.lists(st.integers(1, 2), max_size=12)
operations = 0
seen: Counter[str] = Counter()


@dataclass(eq=False)
class Live:
    seq: KVSequence
    tokens: list[int]
    planned: int | None = None  # positions up to here are written by the next step


class StoreOperations(RuleBasedStateMachine):
    live: list[Live]

    @initialize(shape=st.sampled_from(SHAPES))
    def build(self, shape: tuple[int, int, int, int, bool, tuple[LayerGroup, ...], int]) -> None:
        size, pages, sequences, longest, caching, groups, slots = shape
        self.size = size
        self.store = KVStore(
            num_pages=pages,
            page_size=size,
            max_sequences=sequences,
            max_model_len=longest,
            prefix_caching=caching,
            groups=groups,
            tier=HostTier(np.zeros((slots, size * 8), np.uint8), size) if slots else None,
        )
        self.memory = [np.full((pool.total, size), -1) for pool in self.store.pools]
        self.live = []
        self.pins: list[Pin] = []
        self.refusals = 0  # for want of a slot: two are enough
        self.spoken: list[list[int]] = []  # what was closed once, to come back to

    def done(self, what: str) -> None:
        global operations
        operations += 1
        seen[what] += 1
        self.store.check_integrity()

    def pick(self, index: int) -> Live:
        return self.live[index % len(self.live)]

    # -- operations -----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.store.tables.free_slots or self.refusals < 2)
    @rule(
        stem=st.integers(0, 7),
        cut=st.sampled_from([None, 16, 9, 8, 7, 5, 4, 3]),
        tail=few_tokens,
        namespace=st.sampled_from("aab"),
        cache=st.integers(0, 9),
    )
    def open(self, stem: int, cut: int | None, tail: list[int], namespace: str, cache: int) -> None:
        stems = [*self.spoken[-6:], *STEMS]
        tokens = [*stems[stem % len(stems)][:cut], *tail][: self.store.max_length()] or [1]
        peek = self.store.match_length(_array(tokens), namespace)
        with _Scribbled(tokens) as array:
            seq = self.store.open(array, namespace, use_cache=cache > 0)
        if seq is None:
            assert len(self.live) == self.store.tables.rows[0].shape[0]
            self.refusals += 1
            return self.done("open: no slot")
        assert seq.cached == seq.computed <= len(tokens) - 1
        assert seq.cached in ((peek, peek - peek % self.size) if cache else (0,))
        seen["hit"] += seq.cached > 0
        seen["hit inside a page"] += seq.cached % self.size > 0
        self.live.append(Live(seq, tokens))
        return self.done("open")

    @precondition(lambda self: self.store.tier)
    @rule(which=st.integers(0, 3), length=st.integers(5, 30), ends=st.booleans())
    def come_back(self, which: int, length: int, ends: bool) -> None:
        """What admission does, with one of a few long prompts that push each other out; others give way to it."""
        tokens = [1 + (i * i // 5 + which * i) % 2 for i in range(length)][: self.store.max_length()]
        if not self.store.tables.free_slots:
            self.finish(self.live[0])
        with _Scribbled(tokens) as array:
            seq = self.store.open(array, "a")
            assert seq is not None
            found = seq.computed
            while not self.store.reserve(seq, len(tokens)):
                if self.live:
                    self.finish(self.live[0])
                else:  # pins are in the way
                    self.store.close(seq, array, found)
                    return self.done("come back: refused")
            assert found <= self.store.restore(seq, array) < len(tokens)
        seen["restored"] += seq.computed > found
        seen["restored over a part of a page"] += seq.computed > found and found % self.size > 0
        self.live.append(Live(seq, tokens, planned=len(tokens)))
        if ends:
            self.step(255)
            self.finish(self.live[-1])
        return self.done("come back")

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 20), count=st.integers(1, 14), more=few_tokens)
    def plan(self, index: int, count: int, more: list[int]) -> None:
        one = self.pick(index)
        if len(one.tokens) == one.seq.computed:
            one.tokens.extend(more or [2])
        length = min(one.seq.computed + count, len(one.tokens), self.store.max_model_len)
        if length <= one.seq.computed:
            return self.done("plan: full")
        before = _fingerprint(one.seq)
        if self.store.reserve(one.seq, length):
            one.planned = length
            return self.done("plan")
        if all(group.window is None for group in self.store.groups):
            assert _fingerprint(one.seq) == before
        return self.done("plan: refused")

    @precondition(lambda self: self.live)
    @rule(counts=st.lists(st.integers(0, 20), min_size=3, max_size=6), commits=st.integers(0, 255), more=few_tokens)
    def advance(self, counts: list[int], commits: int, more: list[int]) -> None:
        """What the engine does: plan many, then a step."""
        for i, count in enumerate(counts[: len(self.live)]):
            self.plan(i, 1 + count, more)
        self.step(commits)

    @precondition(lambda self: any(one.planned for one in self.live))
    @rule(commits=st.integers(0, 255))
    def step(self, commits: int) -> None:
        self.run_step()
        for i, one in enumerate(self.live):
            if one.planned is None:
                continue
            if commits >> (i % 8) & 1:
                with _Scribbled(one.tokens) as array:
                    self.store.commit(one.seq, array, one.planned)
            else:
                one.seq.computed = one.planned
            one.planned = None
        self.check_contents()
        self.done("step")

    @precondition(lambda self: self.live and self.store.tables.free_slots)
    @rule(index=st.integers(0, 20), more=few_tokens)
    def fork(self, index: int, more: list[int]) -> None:
        one = self.pick(index)
        child = self.store.fork(one.seq)
        assert child is not None
        one.planned = None
        self.live.append(Live(child, one.tokens[: child.computed] + (more or [1])))
        self.done("fork")

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 20), back=st.sampled_from([0, 1, 2, 3, 9]), more=few_tokens)
    def truncate(self, index: int, back: int, more: list[int]) -> None:
        one = self.pick(index)
        window = any(group.window is not None for group in self.store.groups)
        length = one.seq.computed if window else max(0, one.seq.computed - back)
        self.store.truncate(one.seq, length)
        one.tokens = one.tokens[:length] + (more or [1])
        one.planned = None
        self.done("truncate")

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 20))
    def close(self, index: int) -> None:
        self.finish(self.pick(index))
        self.done("close")

    @precondition(lambda self: self.store.stats().nodes > 5)
    @rule()
    def reset(self) -> None:
        self.store.reset()
        assert self.store.stats().evictable == 0 or self.live or self.pins
        self.done("reset")

    @precondition(lambda self: self.spoken and len(self.pins) < 2)
    @rule(index=st.integers(0, 20), namespace=st.sampled_from("ab"))
    def pin(self, index: int, namespace: str) -> None:
        pin = self.store.pin(_array(self.spoken[index % len(self.spoken)]), namespace)
        if pin is not None:
            self.pins.append(pin)
        self.done("pin" if pin else "pin: not there")

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        self.store.unpin(self.pins.pop())
        self.done("unpin")

    # -- the end: nothing may be stuck ------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        while self.pins:
            self.store.unpin(self.pins.pop())
        while len(self.live) > 1:
            self.finish(self.live[0])
        self.run_step()
        if self.live:
            self.grow_to_the_limit(self.live[0])
            self.finish(self.live[0])
        for pool in self.store.pools:
            pool.drain_copies()
        tally = self.store.stats()
        assert (tally.used, tally.sequences) == (0, 0)
        for eviction in self.store.evictions():
            seen["hole" if eviction.group is not None else "eviction"] += 1
            seen["last page won back"] += "last page" in eviction.reason
        self.store.reset()
        tally = self.store.stats()
        assert (tally.free, tally.namespaces, tally.nodes) == (tally.total, 0, 0)
        self.store.check_integrity()

    def grow_to_the_limit(self, one: Live) -> None:
        """A sequence that is alone reaches max_length, whatever has happened before."""
        one.planned = None
        one.tokens += [1] * self.store.max_model_len
        while one.seq.computed < self.store.max_length():
            length = min(self.store.max_length(), (one.seq.computed // self.size + 1) * self.size)
            assert self.store.reserve(one.seq, length), f"stuck at {one.seq.computed} of {self.store.max_length()}"
            one.planned = length
            self.run_step()
            one.seq.computed = length
            self.check_contents()
            self.store.check_integrity()

    # -- the shadow -------------------------------------------------------------------------------------------------

    def finish(self, one: Live) -> None:
        self.live.remove(one)
        if one.seq.computed:
            self.spoken.append(one.tokens[: one.seq.computed])
        with _Scribbled(one.tokens) as array:
            self.store.close(one.seq, array, one.seq.computed)

    # -- the shadow as the owner of the pages' bytes --------------------------------------------------------------

    def read_page(self, page: int, out: U8) -> None:
        out[:] = self.memory[0][page].view(np.uint8)

    def write_page(self, page: int, data: U8) -> None:
        self.memory[0][page] = data.view(np.int64)

    def run_step(self) -> None:
        moves = self.store.drain_moves()
        if moves is not None:
            assert self.store.tier is not None
            self.store.tier.move(moves, self)
            seen["stored"] += len(moves.stores)
            seen["loaded"] += len(moves.loads)
        for group, pairs in enumerate(self.store.drain_copies()):
            seen["copies"] += len(pairs)
            assert len(set(pairs[:, 1].tolist())) == len(pairs)
            assert not set(pairs[:, 0].tolist()) & set(pairs[:, 1].tolist())
            self.memory[group][pairs[:, 1]] = self.memory[group][pairs[:, 0]]
        for one in self.live:
            if one.planned is None:
                continue
            for group, pool in enumerate(self.store.pools):
                for position in range(one.seq.computed, one.planned):
                    page, offset = self.place(one.seq, group, position)
                    assert pool.holds[page] == 1, "a page is written by one while another holds it"
                    assert pool.cached[page] == 0, "a page is written that the tree keeps"
                    self.memory[group][page, offset] = one.tokens[position]

    def place(self, seq: KVSequence, group: int, position: int) -> tuple[int, int]:
        slot = position - seq.dropped[group]
        assert slot >= 0
        return int(self.store.tables.rows[group][seq.slot, slot // self.size]), slot % self.size

    def check_contents(self) -> None:
        for group, memory in enumerate(self.memory):
            window = self.store.groups[group].window
            for one in self.live:
                seq = one.seq
                first = seq.dropped[group]
                assert first <= max(0, seq.computed - (window or seq.computed)), "the window is not whole"
                row = self.store.tables.rows[group][seq.slot]
                read = memory[row[: -(-(seq.computed - first) // self.size)]].reshape(-1)[: seq.computed - first]
                assert read.tolist() == one.tokens[first : seq.computed]
        for root in self.store.tree.roots.values():
            self.check_node(root, [])

    def check_node(self, node: Node, before: list[int]) -> None:
        path = before + node.tokens.tolist()
        base = node.start // self.size * self.size
        for memory, pages in zip(self.memory, node.pages, strict=True):
            for i, page in enumerate(pages.tolist()):
                expected = path[base + i * self.size : base + (i + 1) * self.size]
                assert page == NO_PAGE or memory[page, : len(expected)].tolist() == expected
        for child in node.children.values():
            self.check_node(child, path)


class _Scribbled:
    """An array of tokens that is overwritten afterwards: the store must not keep its caller's buffer."""

    def __init__(self, tokens: list[int]) -> None:
        self.array = _array(tokens)

    def __enter__(self) -> I32:
        return self.array

    def __exit__(self, *_: object) -> None:
        self.array[:] = 99


def _array(tokens: list[int]) -> I32:
    return np.array(tokens, dtype=np.int32)


def _fingerprint(seq: KVSequence) -> tuple[object, ...]:
    return seq.computed, seq.cached, seq.writable, tuple(seq.blocks), tuple(seq.dropped), seq.anchor


def test_ten_thousand_random_operations_never_mix_lose_or_leak_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    global operations
    monkeypatch.setattr("kvstore.radix.EXTENDABLE_TOKENS", 9)  # so that both ways of growing occur
    operations = 0
    seen.clear()
    run_state_machine_as_test(
        StoreOperations,
        settings=settings(
            max_examples=400,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert operations >= 10_000
    for what in (
        "hit",
        "hit inside a page",
        "copies",
        "plan: refused",
        "open: no slot",
        "fork",
        "truncate",
        "reset",
        "pin",
        "eviction",
        "hole",
        "last page won back",
        "stored",
        "loaded",
        "restored",
        "restored over a part of a page",
    ):
        assert seen[what] > 0, f"the run never saw: {what}"


def test_giving_up_a_windowed_leaf_does_not_keep_another_page_in_its_place() -> None:
    state = StoreOperations()
    state.build(shape=(4, 8, 4, 64, True, (LayerGroup("sliding", window=5),), 0))
    state.open(cache=0, cut=None, namespace="a", stem=0, tail=[])
    state.fork(index=0, more=[1] * 10)
    state.fork(index=0, more=[])
    state.advance(commits=2, counts=[0, 9, 0], more=[])
    state.fork(index=1, more=[1] * 7)
    state.advance(commits=0, counts=[2, 3, 2], more=[2, 1, 1, 1])
    state.close(index=0)
    state.fork(index=8, more=[])
    state.pin(index=0, namespace="a")
    state.advance(commits=0, counts=[1, 0, 2], more=[1, 1])
    state.unpin()
    state.advance(commits=0, counts=[0, 0, 0], more=[])
    state.close(index=0)
    state.advance(commits=0, counts=[0, 0, 0], more=[])
    state.plan(count=1, index=0, more=[])
    state.close(index=8)
    state.step(commits=0)
    state.advance(commits=0, counts=[0, 5, 0], more=[])
    state.teardown()
