"""`leeway bench weights`: what a broadcast costs, full and as a delta, with real AdamW updates.

process pair     publisher (here) -> Redis -> one reader (reader.py); encode, write, read, decode, memory
baseline         one full-weight XADD + XREAD of the same model in the same chunks, nothing else
samplers         --samplers N real sampler processes with vLLM: wall time until all attest, and pause
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis

from leeway.errors import LeewayError
from leeway.streams import Keys, connect
from leeway.weights import CHUNK_BYTES, WeightManifest, free_versions, publish_weights, published_manifests
from leeway_host.bench.reader import PeakMemory
from leeway_host.bench.updates import trained_weights
from leeway_host.redis_server import EmbeddedRedis

if TYPE_CHECKING:
    from torch import Tensor

URL_ENV = "LEEWAY_BENCH_REDIS"
SERVER_READERS = 3
"""Readers at the same time, for what one server can send."""
Weights = dict[str, "Tensor"]
Row = dict[str, Any]


class BenchError(LeewayError):
    """A measurement could not be made."""


class _TimedClient:
    """A client that counts the seconds spent in XADD."""

    def __init__(self, client: redis.Redis) -> None:
        self._client, self.seconds = client, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def xadd(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return self._client.xadd(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - began


class _Reader:
    """A reader process."""

    def __init__(self, url: str, run: str) -> None:
        argv = [sys.executable, "-m", "leeway_host.bench.reader", "--redis", f"env:{URL_ENV}", "--run", run]
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, URL_ENV: url},
        )

    def ask(self, command: Row) -> Row:
        self.send(command)
        return self.receive()

    def send(self, command: Row) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Row:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"the reader process ended with exit code {self._process.wait(10)}")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)


def bench_weights(
    model: Path,
    *,
    learning_rate: float,
    steps: Sequence[int],
    samplers: int,
    progress: Callable[[str], None],
) -> Row:
    """All measurements, as plain values; seconds and bytes. Raises LeewayError when a part fails."""
    with tempfile.TemporaryDirectory(prefix="leeway-bench-") as directory:
        saved = _save_updates(Path(directory), model, steps, learning_rate, progress)
        base = _load(saved[0])
        nbytes = sum(t.numel() * t.element_size() for t in base.values())
        mib = max(1024, 4 * nbytes >> 20)
        result: Row = {
            "model": model.name,
            "parameters": sum(t.numel() for t in base.values()),
            "full_bytes": nbytes,
            "learning_rate": learning_rate,
        }
        with EmbeddedRedis(maxmemory_mib=mib) as server:
            progress("baseline: one full-weight XADD + XREAD")
            result["baseline"] = _baseline(server.url, base)
            result["pair"] = [_pair(server.url, base, base, 0, progress)]
            for step in steps:
                result["pair"].append(_pair(server.url, base, _load(saved[step]), step, progress))
        for row in result["pair"]:
            row["time_ratio"] = row["total_s"] / result["baseline"]["total_s"]
        result["samplers"] = [
            _samplers(model, base, _load(saved[steps[0]]), count, Path(directory), mib, progress)
            for count in _counts(samplers)
        ]
        return result


def _counts(samplers: int) -> list[int]:
    """1, 2, 4, ... up to `samplers`."""
    return [1 << power for power in range(samplers.bit_length()) if 1 << power <= samplers]


def _save_updates(
    directory: Path,
    model: Path,
    steps: Sequence[int],
    learning_rate: float,
    progress: Callable[[str], None],
) -> dict[int, Path]:
    # To disk, so that only two versions are in memory while memory is measured.
    from safetensors.torch import save_file

    saved = {}
    for step, weights in trained_weights(model, steps, learning_rate):
        progress(f"AdamW: {step} of {max(steps)} steps")
        saved[step] = directory / f"{step}.safetensors"
        save_file(weights, saved[step])
    return saved


def _load(path: Path) -> Weights:
    from safetensors.torch import load_file

    # Copied, because pages of a mapped file would count as memory of whoever reads them first.
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def _baseline(url: str, weights: Weights) -> Row:
    client, keys = connect(url), Keys("bench-raw")
    stream = keys.key("raw")
    readers = [_Reader(url, keys.run) for _ in range(SERVER_READERS)]
    try:
        for reader in readers:
            reader.ask({"raw": stream, "chunks": 0})  # its imports are done
        began, chunks = time.perf_counter(), 0
        pending = bytearray()
        for tensor in weights.values():
            pending += _bytes(tensor)
            while len(pending) >= CHUNK_BYTES:
                client.xadd(stream, {"data": bytes(pending[:CHUNK_BYTES])})
                del pending[:CHUNK_BYTES]
                chunks += 1
        if pending:
            client.xadd(stream, {"data": bytes(pending)})
            chunks += 1
        write_s = time.perf_counter() - began
        command = {"raw": stream, "chunks": chunks}
        read_s = readers[0].ask(command)["seconds"]
        for reader in readers:
            reader.send(command)
        answers = [reader.receive() for reader in readers]
        server_bytes_s = sum(a["nbytes"] for a in answers) / max(a["seconds"] for a in answers)
        return {
            "write_s": write_s,
            "read_s": read_s,
            "total_s": write_s + read_s,
            "server_bytes_s": server_bytes_s,
        }
    finally:
        for reader in readers:
            reader.close()
        client.unlink(stream)
        client.close()


def _bytes(tensor: Tensor) -> memoryview:
    import torch

    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _publish(
    client: Any, keys: Keys, version: int, new: Weights, old: Weights | None, base: WeightManifest | None
) -> WeightManifest:
    pairs: Any = new.items() if old is None else ((name, new[name], old[name]) for name in new)
    return publish_weights(client, keys, epoch=0, version=version, step=0, tensors=pairs, base=base)


def _pair(url: str, base: Weights, new: Weights, step: int, progress: Callable[[str], None]) -> Row:
    """One version through a publisher and a reader: in full for `step` 0, else the delta from `base`."""
    progress("full version" if step == 0 else f"delta after {step} steps")
    client, keys = connect(url), Keys("bench-pair")
    reader = _Reader(url, keys.run)
    try:
        first = _publish(client, keys, 1, base, None, None)
        if step:
            reader.ask({"advance": [0, 1]})
        timed, memory = _TimedClient(client), PeakMemory().begin()
        began = time.perf_counter()
        if step:
            manifest = _publish(timed, keys, 2, new, base, first)
        else:
            manifest = _publish(timed, keys, 2, new, None, None)
        publish_s, extra = time.perf_counter() - began, memory.extra_bytes()
        read = reader.ask({"advance": [0, 2]})
        if read["digest"] != manifest.digest:
            raise BenchError(f"the reader holds {read['digest']}, published was {manifest.digest}")
        return {
            "steps": step,
            "codec": manifest.codec,
            "wire_bytes": manifest.wire_nbytes,
            "byte_ratio": manifest.nbytes / manifest.wire_nbytes,
            "encode_s": publish_s - timed.seconds,
            "write_s": timed.seconds,
            "read_s": read["read_s"],
            "decode_s": read["decode_s"],
            "total_s": publish_s + read["read_s"] + read["decode_s"],
            "encoder_extra_bytes": extra,
            "decoder_extra_bytes": read["extra_bytes"] - (0 if step else manifest.nbytes),
        }
    finally:
        reader.close()
        free_versions(client, keys, published_manifests(client, keys))
        client.close()


def _samplers(
    model: Path,
    base: Weights,
    new: Weights,
    count: int,
    directory: Path,
    mib: int,
    progress: Callable[[str], None],
) -> Row:
    """`count` real samplers: seconds from the first byte written until all attest, and their pauses."""
    from leeway.config import RunConfig
    from leeway.config.load import dump_config
    from leeway_host.launch.services import Service, kill_all

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
        wait = _Attestation(client, keys, names, services)
        wait.until(lambda s: True, config.sampler.start_timeout_s, "the first heartbeats")
        full_wall_s, first, full = wait.broadcast(lambda: _publish(client, keys, 1, base, None, None))
        progress(f"{count} samplers: delta")
        delta_wall_s, second, delta = wait.broadcast(lambda: _publish(client, keys, 2, new, base, first))
        return {
            "samplers": count,
            "full_bytes": first.wire_nbytes,
            "full_wall_s": full_wall_s,
            "full_pause_s": full,
            "delta_bytes": second.wire_nbytes,
            "delta_wall_s": delta_wall_s,
            "delta_pause_s": delta,
        }


class _Attestation:
    """Waits for what samplers say."""

    def __init__(self, client: redis.Redis, keys: Keys, names: list[str], services: list[Any]) -> None:
        self.client, self.keys, self.names, self.services = client, keys, names, services

    def until(self, holds: Callable[[Any], bool], budget_s: float, what: str) -> list[Any]:
        from leeway.statuses import read_statuses

        deadline = time.monotonic() + budget_s
        while time.monotonic() < deadline:
            statuses = read_statuses(self.client, self.keys, budget_s=budget_s)
            if len(statuses) == len(self.names) and all(holds(status) for status in statuses):
                return statuses
            for service in self.services:
                if service.poll() is not None:
                    raise BenchError(f"sampler {service.name} ended:\n{service.log_tail()}")
            time.sleep(0.01)
        raise BenchError(f"not within {budget_s:g} s: {what}")

    def broadcast(self, publish: Callable[[], WeightManifest]) -> tuple[float, WeightManifest, float]:
        """(wall seconds until all attest, manifest, mean pause)."""
        began = time.perf_counter()
        manifest = publish()
        statuses = self.until(lambda s: s.digest == manifest.digest, 300.0, "attestation")
        wall_s = time.perf_counter() - began
        return wall_s, manifest, statistics.fmean(status.pause_s for status in statuses)
