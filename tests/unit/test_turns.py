"""Who of several spools in one process may have a bundle on its way."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from rollcast.producer.shipper.turns import Turns

A, B, C = Path("a"), Path("b"), Path("c")


async def _as_far_as_it_goes(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    task = asyncio.create_task(coroutine)
    for _ in range(10):
        await asyncio.sleep(0)
    return task


async def test_bundles_without_deaths_go_side_by_side() -> None:
    turns = Turns()
    await turns.take(A, 0)
    await turns.take(B, 0)


async def test_a_suspect_waits_for_all_others_and_they_for_it() -> None:
    turns = Turns()
    await turns.take(B, 0)
    suspect = await _as_far_as_it_goes(turns.take(A, 1))
    await turns.take(B, 0)
    await turns.take(C, 0)
    turns.end(B)
    assert not suspect.done()
    turns.end(C)
    await suspect
    other = await _as_far_as_it_goes(turns.take(B, 0))
    assert not other.done()
    await turns.take(A, 0)
    await other


async def test_of_several_suspects_the_one_with_the_fewest_deaths_goes_first() -> None:
    turns = Turns()
    for spool in (A, B, C):
        turns.join(spool)
    deadly = await _as_far_as_it_goes(turns.take(A, 7))
    unlucky = await _as_far_as_it_goes(turns.take(B, 1))
    assert not deadly.done()
    assert not unlucky.done(), "nobody has looked into the third spool"
    turns.end(C)
    await unlucky
    turns.end(B)
    await deadly


async def test_a_spool_that_gives_up_waiting_keeps_nobody_waiting() -> None:
    turns = Turns()
    await turns.take(A, 1)
    waiting = [await _as_far_as_it_goes(turns.take(spool, deaths)) for spool, deaths in ((B, 0), (C, 2))]
    waiting[0].cancel()
    await asyncio.wait({waiting[0]})
    turns.end(B)
    turns.end(A)
    await waiting[1]
