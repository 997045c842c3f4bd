"""A Kafka client whose connections have gone silent is replaced, and reading goes on."""

import time
from dataclasses import replace

import pytest

from fixtures.frames import frames_of
from fixtures.installation import PART_BYTES, Installation, keyed, running, shards, until
from fixtures.proxy import proxy_to, send_the_daemon_through


async def test_a_client_whose_connections_went_silent_is_replaced_and_reading_goes_on(
    installed: Installation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = (
        keyed("run", rollout_id, frames_of("run", 1, rollout_id, shards(rollout_id), max_part_bytes=PART_BYTES))
        for rollout_id in (1, 2)
    )
    async with proxy_to(installed.config.bootstrap_servers) as proxy:
        send_the_daemon_through(proxy, monkeypatch)
        async with running(replace(installed.config, stall_after_s=3.0)) as daemon:
            await installed.send(one)
            await installed.dumps(1)
            before = daemon.stats.client_rebuilds
            proxy.stall()
            await installed.send(two)
            await installed.dumps(2)

    assert daemon.stats.client_rebuilds > before
    installed.check("run", 2, shards(2))
    assert "the Kafka client is replaced" in caplog.text


async def test_an_idle_daemon_keeps_its_client(installed: Installation) -> None:
    async with running(replace(installed.config, stall_after_s=2.0)) as daemon:
        await installed.send(keyed("run", 1, frames_of("run", 1, 1, shards(1))))
        await installed.dumps(1)
        before = daemon.stats.client_rebuilds
        # Several times the bound, in which nothing comes.
        await until(lambda: time.monotonic() - daemon.stats.progressed_at > 6.0)

        assert daemon.stats.client_rebuilds == before
