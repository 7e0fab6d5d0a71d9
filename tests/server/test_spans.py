"""The clocks of a profile."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import types
from collections.abc import Iterator

import pytest

import scheduler.engine
from server.replies.chunks import ChunkWriter
from server.spans import Sleeper, thread_times, timed_jobs


def burn(seconds: float) -> str:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
    return "done"


class Worker:
    def work(self, seconds: float) -> str:
        return burn(seconds)

    async def wait(self, seconds: float) -> str:
        burn(seconds)
        await asyncio.sleep(0.05)
        return "waited"

    def fail(self) -> None:
        burn(0.01)
        raise KeyError("broken")


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    module = types.ModuleType("a_module_to_time")
    vars(module).update(Worker=Worker, work=burn)
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_processor_time_is_counted_and_waiting_is_not(module: types.ModuleType) -> None:
    name = module.__name__
    jobs = [(name, "work", "a"), (name, "Worker.work", "b"), (name, "Worker.wait", "c"), (name, "Worker.fail", "d")]
    with timed_jobs(jobs) as seconds:
        assert module.work(0.02) == "done"
        assert Worker().work(0.01) == Worker().work(0.02) == "done"
        assert asyncio.run(Worker().wait(0.01)) == "waited"
        with pytest.raises(KeyError):
            Worker().fail()
        burn(0.02)
    assert seconds["a"] == pytest.approx(0.02, abs=0.005)
    assert seconds["b"] == pytest.approx(0.03, abs=0.005)
    assert seconds["c"] == pytest.approx(0.01, abs=0.008)
    assert seconds["d"] == pytest.approx(0.01, abs=0.005)


def test_afterwards_everything_is_as_it_was(module: types.ModuleType) -> None:
    work = module.work
    with pytest.raises(AttributeError), timed_jobs([(module.__name__, "work", "a"), (module.__name__, "gone", "b")]):
        pass
    assert module.work is work


def test_every_job_of_the_daemon_is_there_and_left_as_it_was() -> None:
    before = scheduler.engine.plan, ChunkWriter.events
    with timed_jobs() as seconds:
        assert scheduler.engine.plan is not before[0]
        assert ChunkWriter.events is not before[1]
        assert set(seconds.values()) == {0.0}
    assert (scheduler.engine.plan, ChunkWriter.events) == before


def test_a_sleeper_says_how_late_it_wakes() -> None:
    sleeper = Sleeper()
    sleeper.start()
    time.sleep(0.05)
    sleeper.stop()
    assert 0 < len(sleeper.late_seconds) <= 60
    assert all(late >= -1e-4 for late in sleeper.late_seconds)


def test_a_threads_time_grows_with_its_work() -> None:
    before = thread_times(threading.get_native_id())
    if before is None:
        pytest.skip("this system does not tell")
    burn(0.05)
    after = thread_times(threading.get_native_id())
    assert after is not None
    assert after[0] - before[0] == pytest.approx(0.05, abs=0.02)
    assert thread_times(0) is None
