"""The shipper's HTTP server: metrics and health, in threads of its own."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server

from rollcast.producer.errors import ShipperError
from rollcast.producer.shipper.health import Health

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_log = logging.getLogger("rollcast.ship")


@contextmanager
def serving(host: str, port: int | None, health: Health, registry: CollectorRegistry) -> Iterator[None]:
    """Serves `/metrics`, `/healthz` and `/readyz` while the context is open; with no port, nothing.

    Raises:
        ShipperError: the address cannot be used.
    """
    if port is None:
        yield
        return
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as exc:
        raise ShipperError(
            f"metrics cannot be served at {host}:{port} ({exc.strerror or exc}); give other values with --metrics-host "
            "and --metrics-port"
        ) from exc
    _log.info("metrics and health at http://%s:%d", host, server.server_port)
    # The library's answers every path with the metrics.
    server.set_app(_with_health(make_wsgi_app(registry), health))
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _with_health(metrics: "WSGIApplication", health: Health) -> "WSGIApplication":
    answers = {"/healthz": health.live_problems, "/readyz": health.ready_problems}

    def application(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            return metrics(environ, start_response)
        found = path in answers
        problems = answers[path]() if found else ["no such page; there are /metrics, /healthz and /readyz"]
        status = "200 OK" if not problems else "503 Service Unavailable" if found else "404 Not Found"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        notes = health.awaited_spools() if path == "/readyz" else []
        lines = problems or ["ok", *notes]
        return ["".join(f"{line}\n" for line in lines).encode(errors="replace")]

    return application
