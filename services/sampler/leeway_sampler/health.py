"""/healthz: the engine lives. /readyz: it holds the current version and takes tickets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from leeway.errors import UsageError


@asynccontextmanager
async def serve_health(
    host: str, port: int, healthy: Callable[[], bool], ready: Callable[[], dict[str, Any]]
) -> AsyncIterator[None]:
    """Serve both within the context; `port` 0 serves nothing.

    `ready()` gives the JSON body of /readyz with the boolean key `ready`; the status is 200 or 503 by it.
    Raises UsageError when the port cannot be used.
    """
    if port == 0:
        yield
        return
    from aiohttp import web

    async def healthz(_: web.Request) -> web.Response:
        alive = healthy()
        return web.json_response({"healthy": alive}, status=200 if alive else 503)

    async def readyz(_: web.Request) -> web.Response:
        body = ready()
        return web.json_response(body, status=200 if body["ready"] else 503)

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, shutdown_timeout=1.0).start()
    except OSError as exc:
        await runner.cleanup()
        raise UsageError(f"sampler.http_port: port {port} on {host} cannot be used: {exc.strerror}") from exc
    try:
        yield
    finally:
        await runner.cleanup()
