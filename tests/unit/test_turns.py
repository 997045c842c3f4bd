"""Who of several spools in one process may have a bundle on its way."""

import asyncio
from pathlib import Path

import pytest

from rollcast.producer.shipper import turns as turns_module
from rollcast.producer.shipper.turns import Turns

A, B, C = Path("a"), Path("b"), Path("c")
FEW, MANY, MORE = 2, 3, 4


async def _wants(turns: Turns, spool: Path, deaths: int) -> asyncio.Task[None]:
    task = asyncio.create_task(turns.take(spool, deaths))
    await _settled()
    return task


async def _settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_bundles_without_deaths_go_side_by_side() -> None:
    turns = Turns()
    await turns.take(A, 0)
    await turns.take(B, 0)
    assert not turns.are_asked_for


@pytest.mark.parametrize("deaths", [1, FEW, MANY, MORE])
async def test_a_suspect_goes_when_nothing_else_is_on_its_way_and_keeps_others_back(deaths: int) -> None:
    turns = Turns()
    await turns.take(B, 0)
    suspect = await _wants(turns, A, deaths)
    assert not suspect.done()
    turns.end(B)
    await suspect
    others = [await _wants(turns, B, 0), await _wants(turns, C, 1)]
    assert not any(other.done() for other in others)
    turns.end(A)
    await others[1]
    assert not others[0].done(), "the one with a few deaths was first"
    turns.end(C)
    await others[0]


async def test_a_bundle_with_a_few_deaths_is_next_and_one_with_more_is_last() -> None:
    turns = Turns()
    await turns.take(C, 0)
    last = await _wants(turns, A, MANY)
    assert not turns.are_asked_for
    await turns.take(C, 0)
    next_one = await _wants(turns, B, FEW)
    assert turns.are_asked_for
    clean = await _wants(turns, C, 0)
    await next_one
    assert not turns.are_asked_for
    turns.end(B)
    await clean
    await _settled()
    assert not last.done()
    turns.end(C)
    await last


async def test_what_nobody_has_looked_into_goes_before_what_is_last() -> None:
    turns = Turns()
    turns.join(A)
    turns.join(B)
    last = await _wants(turns, A, MANY)
    assert not last.done()
    await turns.take(B, 0)
    turns.end(B)
    await last


async def test_of_two_that_are_last_the_one_with_fewer_deaths_goes_first() -> None:
    turns = Turns()
    turns.join(B)
    deadlier = await _wants(turns, A, MORE)
    await turns.take(B, MANY)
    turns.end(B)
    await deadlier


async def test_spools_whose_first_bundles_all_have_a_few_deaths_go_on_side_by_side_after_these() -> None:
    turns = Turns()
    for spool in (A, B, C):
        turns.join(spool)
    firsts = {await _wants(turns, spool, 1): spool for spool in (A, B, C)}
    seconds = []
    while firsts:
        (gone,), _ = await asyncio.wait(firsts, return_when=asyncio.FIRST_COMPLETED)
        seconds.append(await _wants(turns, firsts.pop(gone), 0))
        assert all(second.done() == (not firsts) for second in seconds)


@pytest.mark.parametrize("deaths", [0, FEW, MANY])
async def test_a_spool_that_gives_up_waiting_keeps_nobody_waiting(deaths: int) -> None:
    turns = Turns()
    await turns.take(A, 1)
    given_up, waiting = await _wants(turns, B, deaths), await _wants(turns, C, MORE)
    given_up.cancel()
    await asyncio.wait({given_up})
    turns.end(B)
    turns.end(A)
    await waiting


async def test_what_is_last_waits_for_a_bounded_time_where_others_always_have_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns_module, "_LAST_WAITS_S", 0.05)
    turns = Turns()
    busy = [B, C]
    for spool in busy:
        await turns.take(spool, 0)
    last = await _wants(turns, A, MANY)

    async def ship_for_ever(spool: Path) -> None:
        while True:
            await turns.take(spool, 0)
            await asyncio.sleep(0.001)

    others = [asyncio.create_task(ship_for_ever(spool)) for spool in busy]
    async with asyncio.timeout(5):
        await last
    # All of them wait for it: should it end the process, nothing else was on its way.
    await asyncio.wait(others, timeout=0.02)
    assert not any(other.done() for other in others)
    for other in others:
        other.cancel()
    await asyncio.wait(others)
