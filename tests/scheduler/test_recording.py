"""A recorded run can be decided again, without its model, and comes out the same."""

from __future__ import annotations

import asyncio
import json
import random
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scheduler.recording import replay


def record(tools: Any, path: Path, seed: int, **options: Any) -> None:
    rng = random.Random(seed)

    async def test(bench: Any) -> None:
        async def one(number: int) -> None:
            head = list(range(rng.choice([1, 3, 30, 60])))
            request = tools.request(
                f"r{number}",
                [*head, number % 61],
                n=rng.choice([1, 1, 2, 3]),
                max_tokens=rng.randint(0, 40),
                priority=rng.randint(-1, 1),
                namespace=rng.choice([None, None, "other"]),
                temperature=1.0,
                seed=number,
                ignore_eos=rng.random() < 0.5,
                stop_token_ids=(3, 4) if rng.random() < 0.3 else (),
                min_tokens=0,
                logprobs=rng.choice([None, 2]),
                prompt_logprobs=rng.choice([None, None, 1]),
            )
            await asyncio.sleep(rng.random() * 0.05)
            [stream] = bench.engine.submit([request])
            reading = asyncio.create_task(tools.read(stream))
            if rng.random() < 0.4:
                await asyncio.sleep(rng.random() * 0.02)
                if rng.random() < 0.5:
                    bench.engine.cancel(request.id)
                else:
                    bench.engine.stop_choice(request.id, 0)
            await reading

        await asyncio.gather(*(one(number) for number in range(60)))
        pin = bench.engine.pin(np.arange(30, dtype=np.int32), None)
        await asyncio.gather(*(one(number) for number in range(60, 100)))
        if pin is not None:
            bench.engine.unpin(pin)
        bench.engine.reset_cache()
        await asyncio.gather(*(one(number) for number in range(100, 130)))
        if options.get("fails"):
            keep = bench.runner.before

            def fail(batch: Any) -> None:
                bench.runner.before = keep
                raise RuntimeError("broken")

            bench.runner.before = fail
            await asyncio.gather(*(one(number) for number in range(130, 150)))

    fixed = {name: value for name, value in options.items() if name != "fails"}
    tools.run_engine(test, num_pages=34, page_size=4, max_model_len=110, max_num_seqs=6, journal=path, **fixed)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "prefix"])
@pytest.mark.parametrize("slots", [0, 60])
@pytest.mark.parametrize("fails", [False, True])
def test_every_decision_is_taken_again(tools: Any, tmp_path: Path, policy: str, slots: int, fails: bool) -> None:
    path = tmp_path / "journal"
    record(tools, path, slots, policy=policy, slots=slots, fails=fails)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    seen = {"admitted": 0, "preempted": 0, "restored": 0, "evicted": 0}
    for recorded, repeated in replay(path):
        assert repeated == recorded
        for what in ("admitted", "preempted"):
            seen[what] += len(recorded[what])
        seen["restored"] += sum(restored for *_, restored in recorded["admitted"])
        seen["evicted"] = max([seen["evicted"], *(eviction[0] for eviction in recorded["evicted"])])
    assert seen.pop("restored") > 0 or not slots
    assert all(seen.values()), seen


def test_a_recording_that_breaks_off_in_a_line_is_replayed_up_to_there(tools: Any, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    record(tools, path, 1)
    whole = len(list(replay(path)))
    path.write_text(path.read_text()[: path.stat().st_size * 2 // 3])
    again = list(replay(path))
    assert 0 < len(again) < whole
    assert all(recorded == repeated for recorded, repeated in again)


def test_a_changed_recording_is_told_from_the_real_one(tools: Any, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    record(tools, path, 1)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    ran = {row[0] for line in lines if line["kind"] == "plan" for row in line["decisions"]["rows"]}
    submitted = next(
        line for line in lines if line["kind"] == "submit" and line["id"] in ran and len(line["prompt"]) > 30
    )
    submitted["prompt"] = submitted["prompt"][:5]
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises((AssertionError, ValueError)):  # noqa: PT012
        for recorded, repeated in replay(path):
            assert recorded == repeated


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for content in ("", "{}", "not JSON"):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"recording|Expecting"):
            list(replay(path))
