"""Real samplers with vLLM: wall time of a broadcast until all of them attest, and how long they pause."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import redis

from leeway.config import RunConfig
from leeway.config.identity import identify
from leeway.config.load import dump_config
from leeway.messages import SamplerStatus
from leeway.statuses import read_statuses
from leeway.streams import Keys, connect
from leeway.weights import WeightManifest
from leeway_host.bench.common import URL_ENV, BenchError, Row, Weights, publish
from leeway_host.launch.services import Service, kill_all
from leeway_host.redis_server import EmbeddedRedis

ATTEST_S = 300.0


def measure_samplers(
    model: Path,
    base: Weights,
    new: Weights,
    count: int,
    directory: Path,
    mib: int,
    progress: Callable[[str], None],
) -> Row:
    """`count` real samplers: seconds from the first byte written until all attest, and their pauses."""
    progress(f"{count} samplers: starting vLLM")
    config = RunConfig.model_validate(
        {
            "task": {"kind": "digits"},
            "model": {"max_length": 64},
            "sampler": {"replicas": count, "max_num_seqs": 8},
            "sync": {"heartbeat_s": 0.2, "ticket_idle_s": 10.0},
        }
    )
    path = directory / f"{count}.yaml"
    path.write_text(dump_config(config))
    keys = Keys(f"bench-{count}")
    names = [f"s{number}" for number in range(count)]
    argv = [sys.executable, "-m", "leeway_sampler", "--config", str(path), "--run", keys.run]
    argv += ["--redis", f"env:{URL_ENV}", "--model", str(model)]
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedRedis(maxmemory_mib=mib))
        client = connect(server.url)
        services = [
            Service(name, [*argv, "--id", name], directory / f"{count}-{name}.log", {URL_ENV: server.url})
            for name in names
        ]
        stack.callback(kill_all, services)
        for service in services:
            service.start()
        digest = identify(config).digest
        wait = Attestation(client, keys, names, services)
        wait.until(lambda s: True, config.sampler.start_timeout_s, "the first heartbeats")
        full_wall_s, first, full = wait.broadcast(lambda: publish(client, keys, 1, base, None, None, digest))
        progress(f"{count} samplers: delta")
        delta_wall_s, second, delta = wait.broadcast(
            lambda: publish(client, keys, 2, new, base, first, digest)
        )
        return {
            "samplers": count,
            "full_bytes": first.wire_nbytes,
            "full_wall_s": full_wall_s,
            "full_pause_s": full,
            "delta_bytes": second.wire_nbytes,
            "delta_wall_s": delta_wall_s,
            "delta_pause_s": delta,
        }


class Attestation:
    """Waits for what samplers report."""

    def __init__(self, client: redis.Redis, keys: Keys, names: list[str], services: list[Service]) -> None:
        self.client, self.keys, self.names, self.services = client, keys, names, services

    def until(
        self, holds: Callable[[SamplerStatus], bool], budget_s: float, what: str
    ) -> list[SamplerStatus]:
        """The statuses once `holds` is true of every sampler; BenchError after `budget_s` seconds."""
        deadline = time.monotonic() + budget_s
        while time.monotonic() < deadline:
            statuses = read_statuses(self.client, self.keys, budget_s=budget_s)
            if len(statuses) == len(self.names) and all(holds(status) for status in statuses):
                return statuses
            for service in self.services:
                if service.poll() is not None:
                    raise BenchError(f"sampler {service.name} ended:\n{service.log_tail()}")
            time.sleep(0.01)
        raise BenchError(f"no {what} within {budget_s:g} s")

    def broadcast(self, publish: Callable[[], WeightManifest]) -> tuple[float, WeightManifest, float]:
        """(wall seconds until all attest, manifest, mean pause)."""
        began = time.perf_counter()
        manifest = publish()
        statuses = self.until(lambda s: s.digest == manifest.digest, ATTEST_S, "attestation")
        wall_s = time.perf_counter() - began
        return wall_s, manifest, statistics.fmean(status.pause_s for status in statuses)
