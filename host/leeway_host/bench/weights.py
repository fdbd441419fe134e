"""`leeway bench weights`: what a broadcast costs, in full and as a delta, with real AdamW updates.

baseline         one full-weight XADD + XREAD of the model in the same chunks, and nothing else       pair.py
process pair     publisher (here) -> Redis -> one reader; encode, write, read, decode, memory         pair.py
samplers         --samplers N sampler processes with vLLM: wall time until all attest, and pause  samplers.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from leeway_host.bench.common import Row, Weights
from leeway_host.bench.pair import measure_baseline, measure_pair
from leeway_host.bench.samplers import measure_samplers
from leeway_host.bench.updates import trained_weights
from leeway_host.redis_server import EmbeddedRedis


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
            result["baseline"] = measure_baseline(server.url, base)
            result["pair"] = [measure_pair(server.url, base, base, 0, progress)]
            for step in steps:
                result["pair"].append(measure_pair(server.url, base, _load(saved[step]), step, progress))
        for row in result["pair"]:
            row["time_ratio"] = row["total_s"] / result["baseline"]["total_s"]
        result["samplers"] = [
            measure_samplers(model, base, _load(saved[steps[0]]), count, Path(directory), mib, progress)
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
