"""The process pair: a publisher here, Redis and reader processes; and the baseline without a codec."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import redis

from leeway.streams import Keys, connect
from leeway.weights import CHUNK_BYTES, free_versions, published_manifests
from leeway_host.bench.common import URL_ENV, BenchError, Row, Weights, publish
from leeway_host.bench.reader import PeakMemory

if TYPE_CHECKING:
    from torch import Tensor

SERVER_READERS = 3
"""Concurrent readers, to measure how much one server can send."""


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
        answer: Row = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)


def measure_baseline(url: str, weights: Weights) -> Row:
    """One full-weight XADD + XREAD of the same weights in the same chunks, and nothing else."""
    client, keys = connect(url), Keys("bench-raw")
    stream = keys.key("raw")
    readers = [_Reader(url, keys.run) for _ in range(SERVER_READERS)]
    try:
        for reader in readers:
            reader.ask({"raw": stream, "chunks": 0})  # wait for its imports
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


def measure_pair(url: str, base: Weights, new: Weights, step: int, progress: Callable[[str], None]) -> Row:
    """One version through a publisher and a reader: in full for `step` 0, otherwise the delta from `base`."""
    progress("full version" if step == 0 else f"delta after {step} steps")
    client, keys = connect(url), Keys("bench-pair")
    reader = _Reader(url, keys.run)
    try:
        first = publish(client, keys, 1, base, None, None)
        if step:
            reader.ask({"advance": [0, 1]})
        timed, memory = _TimedClient(client), PeakMemory().begin()
        began = time.perf_counter()
        if step:
            manifest = publish(timed, keys, 2, new, base, first)
        else:
            manifest = publish(timed, keys, 2, new, None, None)
        publish_s, extra = time.perf_counter() - began, memory.extra_bytes()
        read = reader.ask({"advance": [0, 2]})
        if read["digest"] != manifest.digest:
            raise BenchError(f"the reader has digest {read['digest']}, published was {manifest.digest}")
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
        free_versions(client, keys, published_manifests(client, keys), epoch=0)
        client.close()


def _bytes(tensor: Tensor) -> memoryview:
    import torch

    data: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(data)
