"""What a reader sees of a request."""

from __future__ import annotations

import asyncio

from scheduler.stream import RequestStream, TokenLogprob


def test_updates_that_nobody_has_read_are_merged_per_choice() -> None:
    async def main() -> None:
        stream = RequestStream("r", 2)
        for token in range(5):
            stream.put_token(0, token, TokenLogprob(-1.0, ()), 3)
            stream.put_token(1, 10 + token, None, 3)
        first, second = await anext(stream), await anext(stream)
        assert (first.index, first.tokens, len(first.logprobs), first.cached_tokens) == (0, [0, 1, 2, 3, 4], 5, 3)
        assert (second.index, second.tokens, second.logprobs) == (1, [10, 11, 12, 13, 14], [])

    asyncio.run(main())


def test_a_waiting_reader_wakes_once_and_gets_the_end_with_the_last_token() -> None:
    async def main() -> None:
        stream = RequestStream("r", 1)
        reader = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        stream.put_token(0, 5, None, 0)
        stream.finish(0, "length", cached_tokens=0)
        update = await reader
        assert (update.tokens, update.finish_reason) == ([5], "length")
        assert [update async for update in stream] == []

    asyncio.run(main())


def test_a_reader_that_gave_up_waiting_can_come_back() -> None:
    async def main() -> None:
        stream = RequestStream("r", 1)
        reader = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        reader.cancel()
        await asyncio.sleep(0)
        stream.put_token(0, 5, None, 0)
        assert (await anext(stream)).tokens == [5]

    asyncio.run(main())


def test_it_ends_when_every_choice_has_ended() -> None:
    async def main() -> None:
        stream = RequestStream("r", 2)
        stream.finish(1, "stop", cached_tokens=0, stop_token=9)
        assert (await anext(stream)).stop_token == 9
        rest = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        assert not rest.done()
        stream.finish(0, "length", cached_tokens=0)
        assert (await rest).index == 0
        assert [update async for update in stream] == []

    asyncio.run(main())
