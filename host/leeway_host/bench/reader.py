"""A process that reads weights as a sampler does, without an engine: one JSON command and answer per line.

{"advance": [epoch, version]}          bring a HostCopy there -> read_s, decode_s, extra_bytes, digest
{"raw": stream, "chunks": n}           XREAD the entries one by one, unverified -> seconds
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import redis

from leeway.process import secret
from leeway.streams import Keys, connect
from leeway.weights import ChunkSource, HostCopy, plan_chain, published_manifests

CLEAR_PEAK = "5"


class TimedSource(ChunkSource):
    """Counts the seconds spent in reads."""

    seconds = 0.0

    def read(self, stream: str, index: int, size: int, version: int) -> bytes:
        began = time.perf_counter()
        data = super().read(stream, index, size, version)
        self.seconds += time.perf_counter() - began
        return data


class PeakMemory:
    """Peak resident memory between begin() and extra_bytes(), beyond what there was at begin()."""

    def begin(self) -> PeakMemory:
        Path("/proc/self/clear_refs").write_text(CLEAR_PEAK)  # resets the peak
        self._before = _status("VmRSS")
        return self

    def extra_bytes(self) -> int:
        return max(0, _status("VmHWM") - self._before)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


class Reader:
    """Answers commands."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self.client, self.keys, self.copy = client, keys, HostCopy()

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        if "raw" in command:
            return self.raw(command["raw"], command["chunks"])
        epoch, version = command["advance"]
        published = published_manifests(self.client, self.keys)
        source, memory = TimedSource(self.client), PeakMemory().begin()
        began = time.perf_counter()
        self.copy.advance(source, self.keys, plan_chain(published, (epoch, version), self.copy.held))
        seconds = time.perf_counter() - began
        extra = memory.extra_bytes()
        self.copy.keep()
        assert self.copy.held is not None
        return {
            "read_s": source.seconds,
            "decode_s": seconds - source.seconds,
            "extra_bytes": extra,
            "digest": self.copy.held.digest,
        }

    def raw(self, stream: str, chunks: int) -> dict[str, Any]:
        began, last, nbytes = time.perf_counter(), b"0", 0
        for _ in range(chunks):
            reply: Any = self.client.xread({stream: last}, count=1)
            last, fields = reply[0][1][0]
            nbytes += len(fields[b"data"])
        return {"seconds": time.perf_counter() - began, "nbytes": nbytes}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--redis", required=True)
    parser.add_argument("--run", required=True)
    args = parser.parse_args()
    reader = Reader(connect(secret(args.redis)), Keys(args.run))
    for line in sys.stdin:
        print(json.dumps(reader.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
