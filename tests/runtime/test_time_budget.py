"""A time limit that leaves out the time in which this process was suspended."""

import asyncio
import time

import pytest

from dynamo_megatron.runtime.time_budget import LOOK_EVERY, TimeBudget


async def answer(seconds: float) -> str:
    await asyncio.sleep(seconds)
    await asyncio.sleep(0)  # an answer takes several turns of the event loop
    return "answer"


def suspended(seconds: float) -> None:
    """As if this process had been stopped: the event loop stands still."""
    asyncio.get_running_loop().call_later(0.05, time.sleep, seconds)


def test_what_came_while_the_process_was_suspended_is_in_time():
    async def work() -> float:
        budget = TimeBudget(2 * LOOK_EVERY)
        suspended(3 * LOOK_EVERY)
        assert await budget.spend(answer(0.2)) == "answer"
        return budget.left

    assert asyncio.run(work()) >= 0.9 * LOOK_EVERY


def test_several_awaits_share_the_limit_and_what_is_late_is_cancelled():
    ended = []

    async def late() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def work() -> None:
        budget = TimeBudget(0.5)
        assert await budget.spend(answer(0.3)) == "answer"
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            await budget.spend(late())
        assert 0.1 <= time.monotonic() - start < 0.45 and ended == [True]

    asyncio.run(work())


def test_errors_and_cancelling_pass_through():
    async def fails() -> None:
        raise KeyError("x")

    async def work() -> None:
        with pytest.raises(KeyError):
            await TimeBudget(5.0).spend(fails())
        inner = asyncio.Event()

        async def waits() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                inner.set()

        outer = asyncio.create_task(TimeBudget(60.0).spend(waits()))
        await asyncio.sleep(0.05)
        outer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outer
        assert inner.is_set()

    asyncio.run(work())
