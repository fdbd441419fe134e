"""What a sampler reports about itself."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from types import SimpleNamespace
from typing import Any

from leeway.health import serve_health
from leeway_sampler import status
from leeway_sampler.status import Counters, SamplerHealth
from leeway_sampler.watch import WeightWatcher
from leeway_sampler.weight_update import EngineWeights


def test_counters_add_up():
    counters = Counters("c")
    with counters.working():
        counters.generated(10)
        counters.generated(4, void=True)
        assert counters.inflight == 1
    weights = EngineWeights(None, "redis", None)  # type: ignore[arg-type]
    engine = SimpleNamespace(weights=weights, logprobs_mode="processed_logprobs", bans=["min_tokens=2"])
    watcher = WeightWatcher(None, None, 1.0, None, "c", None)  # type: ignore[arg-type]
    watcher.set_fence("0.1.5")
    made = counters.status("s", ready=True, engine=engine, watcher=watcher, probe=None)  # type: ignore[arg-type]
    assert (made.tokens, made.tokens_voided, made.inflight, made.version) == (14, 4, 0, -1)
    assert (made.epoch, made.fenced, made.passed, made.stuck) == (-1, True, "", None)
    assert (made.logprobs_mode, made.bans) == ("processed_logprobs", ["min_tokens=2"])
    assert (made.config, made.config_differs) == ("c", [])
    assert 0 <= made.busy_s <= made.uptime_s


def get(port: int, page: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{page}", timeout=10) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


async def test_health_pages_are_answered_by_the_event_loop(monkeypatch):
    monkeypatch.setattr(status, "ANSWER_S", 0.3)
    body = {"ready": True, "epoch": 0, "version": 3}
    sampler = SimpleNamespace(healthy=lambda: True, readiness=lambda: body)
    health = SamplerHealth(sampler, asyncio.get_running_loop())  # type: ignore[arg-type]
    with serve_health(health, 0, "127.0.0.1") as port:
        assert await asyncio.to_thread(get, port, "/healthz") == (200, {"healthy": True})
        assert await asyncio.to_thread(get, port, "/readyz") == (200, body)
        sampler.healthy = lambda: False
        assert await asyncio.to_thread(get, port, "/healthz") == (503, {"healthy": False})
        sampler.healthy = lambda: True
        asking = asyncio.create_task(asyncio.to_thread(get, port, "/healthz"))
        await asyncio.sleep(0)
        time.sleep(0.8)  # noqa: ASYNC251 (the loop is blocked on purpose)
        assert await asking == (503, {"healthy": False})
