"""The daemon's HTTP server: metrics and health."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from rollcast.consumer.errors import ConsumeConfigError
from rollcast.consumer.health import Health

_CLOSE_TIMEOUT_S = 1.0

_log = logging.getLogger("rollcast.consumer")
_server_log = logging.getLogger("rollcast.consumer.http")


def _is_ours(record: logging.LogRecord) -> bool:
    """Returns False for a request that is no HTTP: its sender is told, and anybody can send a thousand of them."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


_server_log.addFilter(_is_ours)


@asynccontextmanager
async def serving(host: str, port: int, health: Health, registry: CollectorRegistry) -> AsyncIterator[int]:
    """Serves `/metrics`, `/healthz` and `/readyz` in the running loop; yields the port, which matters for port 0.

    Raises:
        ConsumeConfigError: the address cannot be used.
    """
    runner = web.AppRunner(
        _application(health, registry), access_log=None, logger=_server_log, shutdown_timeout=_CLOSE_TIMEOUT_S
    )
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as exc:
            raise ConsumeConfigError(
                f"HTTP cannot be served at {host}:{port}: {exc}; give other values with --http-host and --http-port"
            ) from exc
        bound: int = runner.addresses[0][1]
        _log.info("metrics and health at http://%s:%d", host, bound)
        yield bound
    finally:
        await runner.cleanup()


def _application(health: Health, registry: CollectorRegistry) -> web.Application:
    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def healthz(_request: web.Request) -> web.Response:
        return _answer(health.live_problems())

    async def readyz(_request: web.Request) -> web.Response:
        return _answer(health.ready_problems())

    application = web.Application()
    application.add_routes(
        [web.get("/metrics", metrics), web.get("/healthz", healthz), web.get("/readyz", readyz)],
    )
    return application


def _answer(problems: list[str]) -> web.Response:
    return web.Response(text="\n".join(problems or ["ok"]) + "\n", status=503 if problems else 200)
