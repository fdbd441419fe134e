"""Fan-out of one weight version to many samplers: a simulation from measured rates.

Servers (a primary and its replicas) send chunks; each divides its bandwidth evenly among its readers. A
replica receives the version from the primary chunk by chunk, and its readers cannot be ahead of it. Samplers
decode while they read, and load once they have everything. All samplers start at once, which is the worst
case and what a resync does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rates:
    """Measured bytes per second; `weight` bytes count the whole model, `wire` bytes what is sent."""

    server_bytes_s: float
    """What a server, which has one thread, sends over loopback."""
    network_bytes_s: float
    """What its network card sends."""
    encode_weight_bytes_s: float
    decode_weight_bytes_s: float
    """Apply and verify, without reading."""
    reader_wire_bytes_s: float
    """What one reader receives."""
    load_weight_bytes_s: float
    """Reload of the engine, while it is paused."""

    @property
    def out_bytes_s(self) -> float:
        """What a server sends to all its readers together."""
        return min(self.server_bytes_s, self.network_bytes_s)


@dataclass(frozen=True)
class Size:
    """Bytes of the weights, and of what is sent of them."""

    weight_bytes: float
    wire_bytes: float


@dataclass(frozen=True)
class Broadcast:
    """Seconds of one broadcast. `read_s`: from the manifest until the last sampler has all bytes."""

    encode_s: float
    read_s: float
    decode_s: float
    pause_s: float

    @property
    def wall_s(self) -> float:
        """From the first byte encoded until the last sampler attests."""
        return self.encode_s + max(self.read_s, self.decode_s) + self.pause_s


STEPS = 400


def simulate(rates: Rates, size: Size, *, samplers: int, replicas: int) -> Broadcast:
    """One broadcast to `samplers`, read from the primary, or with `replicas` from those."""
    return Broadcast(
        encode_s=size.weight_bytes / rates.encode_weight_bytes_s,
        read_s=_read_seconds(rates, size.wire_bytes, samplers, replicas),
        decode_s=size.weight_bytes / rates.decode_weight_bytes_s,
        pause_s=size.weight_bytes / rates.load_weight_bytes_s,
    )


def _read_seconds(rates: Rates, wire_bytes: float, samplers: int, replicas: int) -> float:
    """In small steps: replicas fill from the primary, readers from their replica, which stays ahead."""
    if not replicas:
        return wire_bytes / min(rates.out_bytes_s / samplers, rates.reader_wire_bytes_s)
    fill_s = rates.out_bytes_s / replicas
    busiest = -(-samplers // replicas)
    drain_s = min(rates.out_bytes_s / busiest, rates.reader_wire_bytes_s)
    # The readers of the busiest replica finish last.
    step_s = (wire_bytes / fill_s + wire_bytes / drain_s) / STEPS
    at_replica = at_reader = seconds = 0.0
    while at_reader < wire_bytes:
        at_replica = min(wire_bytes, at_replica + fill_s * step_s)
        at_reader = min(at_replica, at_reader + drain_s * step_s)
        seconds += step_s
    return seconds


def replicas_needed(rates: Rates, size: Size, *, samplers: int, most: int = 64) -> int:
    """The smallest number of replicas at which reading is no longer the bottleneck, or stops improving.

    Reading is hidden when it takes no longer than decoding or loading, which more servers do not shorten.
    """
    best, best_s = 0, float("inf")
    for count in range(most + 1):
        done = simulate(rates, size, samplers=samplers, replicas=count)
        if done.read_s <= max(done.decode_s, done.pause_s):
            return count
        if done.read_s < 0.99 * best_s:
            best, best_s = count, done.read_s
    return best


def samplers_from_which_replicas_help(rates: Rates, size: Size) -> int:
    """The smallest power of two (at most 4096) of samplers for which replicas help; 0: none."""
    for power in range(13):
        if replicas_needed(rates, size, samplers=1 << power):
            return 1 << power
    return 0


def rates_from(result: dict[str, Any], *, network_bytes_s: float, load_bytes_s: float | None) -> Rates:
    """Rates from what `leeway bench weights --json` printed.

    `load_bytes_s`: how fast an engine reloads, if not on the machine that was measured.
    """
    full = result["full_bytes"]
    delta = result["pair"][1]
    if load_bytes_s is None:
        load_bytes_s = full / result["samplers"][0]["delta_pause_s"]
    return Rates(
        server_bytes_s=result["baseline"]["server_bytes_s"],
        network_bytes_s=network_bytes_s,
        encode_weight_bytes_s=full / delta["encode_s"],
        decode_weight_bytes_s=full / delta["decode_s"],
        reader_wire_bytes_s=full / result["baseline"]["read_s"],
        load_weight_bytes_s=load_bytes_s,
    )


def rows(
    rates: Rates, *, parameters: Sequence[float], samplers: Sequence[int], delta_ratio: float
) -> list[dict[str, Any]]:
    """One row per model of bfloat16 `parameters`, kind (full; delta: bytes / delta_ratio) and samplers."""
    made = []
    for count in parameters:
        for kind, ratio in (("full", 1.0), ("delta", delta_ratio)):
            size = Size(weight_bytes=2 * count, wire_bytes=2 * count / ratio)
            point = samplers_from_which_replicas_help(rates, size)
            for number in samplers:
                needed = replicas_needed(rates, size, samplers=number)
                made.append(
                    {
                        "parameters": count,
                        "kind": kind,
                        "samplers": number,
                        "alone": simulate(rates, size, samplers=number, replicas=0),
                        "replicas": needed,
                        "with_replicas": simulate(rates, size, samplers=number, replicas=needed),
                        "replicas_help_from": point,
                    }
                )
    return made
