"""Memory over thousands of steps: controller, checks, the launcher's files and the trainer's streams.

    python benchmarks/bench_memory.py [--steps 10000] [--samplers 64]

The objects are those of a run, around a real server; engines and policy are left out. All of them live in one
process, so that its growth is the sum of theirs. Exits with 1 if they grow by more than LIMIT_MIB per 1,000
steps after the first 2,000.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from leeway.config.load import build_config
from leeway.messages import (
    ReportHeader,
    Rollout,
    RolloutHeader,
    SamplerStatus,
    Ticket,
    decode,
    encode,
    encode_status,
)
from leeway.metrics.areas.lag import LAG_ESS_SEQ, LAG_ESS_TOK
from leeway.streams import TICKETS_GROUP, Consumer, Keys, connect, now
from leeway.weights import publish_offer
from leeway.weights.manifest import TensorSpec
from leeway_controller.check_feed import CheckFeed
from leeway_controller.reconcile import Controller
from leeway_host.launch.checks import CheckFile
from leeway_host.launch.record import Recorder
from leeway_host.launch.stream_follower import Follower
from leeway_host.redis_server import EmbeddedRedis
from leeway_trainer.feed import Feed

EVERY, LIMIT_MIB, MIB = 1000, 1.0, 1 << 20
PROMPTS, GROUP, TOKENS = 2, 2, 16
SAVE_EVERY, BEAT_EVERY = 10, 5
SAME = {"ticket_id", "epoch", "version", "batch", "group", "index", "item"}
SPEC = TensorSpec(name="w", dtype="bfloat16", shape=(8,), nbytes=16, offset=0, digest="0" * 16)


class Silent:
    """A view that shows nothing."""

    def status(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def row(self, row: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class SimulatedRun:
    """Everything of a run but engines and policy, in one process."""

    def __init__(self, client: Any, out: Path, steps: int, samplers: int) -> None:
        self.client, self.keys = client, Keys("memory")
        self.config = build_config(
            {
                "task": {"kind": "digits"},
                "batch": {"prompts": PROMPTS, "group_size": GROUP},
                "trainer": {"steps": steps + 1},
                "sync": {"max_age": 16},
            }
        )
        self.names = [f"sampler-{number}" for number in range(samplers)]
        client.hset(self.keys.state, "epoch", 1)
        checks = CheckFeed(client, self.keys, self.config, lambda ids: (str(ids), ids))
        self.controller = Controller(client, self.keys, self.config, lambda i: [i % 50 + 1], 1000, checks)
        self.feed = Feed(client, self.keys, self.config, epoch=1, version=0, next_batch=0)
        self.tickets = Consumer(client, self.keys.tickets, TICKETS_GROUP, "sampler-0", budget_s=5)
        self.follower = Follower(
            client,
            self.keys,
            Recorder(out, self.config, "memory"),
            Silent(),
            CheckFile(client, self.keys, out),
            lambda report: None,
            budget_s=5,
        )
        self.version, self.published_at = -1, 0
        self.publish(0)
        self.report("started", 0)

    def publish(self, step: int) -> None:
        self.version += 1
        self.digest = publish_offer(
            self.client, self.keys, transport="none", offer={}, specs=[SPEC], epoch=1, version=self.version,
            step=step,
        ).digest  # fmt: skip
        self.client.xtrim(self.keys.weights, maxlen=2, approximate=False)
        self.published_at = step

    def report(self, event: str, step: int) -> None:
        metrics: dict[str, float | str] = {f"a/metric_{n}": step + n / 3 for n in range(60)}
        metrics |= {
            LAG_ESS_TOK: 0.9,
            LAG_ESS_SEQ: 0.9,
            "lag/clip_fraction": 0.0,
            "reward/mean": 0.5,
            "tokens": 64.0,
        }
        self.feed.report(
            ReportHeader(
                event=event, epoch=1, step=step, version=self.version,
                age=step + 1 - self.published_at, metrics=metrics if event == "step" else {},
            )
        )  # fmt: skip

    def heartbeats(self, step: int) -> int:
        """Statuses of all samplers; returns the bytes of one."""
        with self.client.pipeline(transaction=False) as pipe:
            for name in self.names:
                status = SamplerStatus(
                    sampler=name, heartbeat=now(), ready=True, epoch=1, version=self.version,
                    digest=self.digest, inflight=256, tokens=step * 1000, uptime_s=float(step),
                )  # fmt: skip
                raw = encode_status(status)
                pipe.set(self.keys.sampler(name), raw)
                pipe.sadd(self.keys.samplers, name)
            pipe.execute()
        return len(raw)

    def answer(self) -> None:
        """Answer all tickets, as samplers do."""
        for entry in self.tickets.read(1000, 0):
            ticket = decode(Ticket, entry.fields).header
            header = RolloutHeader(
                **ticket.model_dump(include=SAME),
                sampler="sampler-0",
                finish_reason="stop",
                reward=float(ticket.index),
                spans=[(0, TOKENS, ticket.version)],
            )
            ids = np.arange(1, TOKENS + 1, dtype=np.int32)
            logp, offsets = np.full(TOKENS, -0.5, np.float32), np.arange(TOKENS + 1, dtype=np.int32)
            rollout = Rollout(header, ids, ids, logp, offsets, ids, logp)
            self.client.xadd(self.keys.rollouts, encode(rollout))
            self.tickets.ack([entry.id])

    def step(self, step: int) -> None:
        if step % BEAT_EVERY == 0 or self.published_at == step:
            self.heartbeats(step)
        deadline = time.monotonic() + 60
        while not self.feed.assembler.complete():
            if time.monotonic() > deadline:
                sys.exit(f"step {step}: no batch; {self.controller.state}")
            self.controller.tick()
            self.answer()
            self.feed.wait(lambda: True)
            self.feed._read()
        self.feed.take()
        self.report("step", step)
        self.controller.tick()
        verdict = self.feed.verdicts.wait(step, 30, lambda: False)
        assert verdict is not None, f"no verdict on step {step}"
        if verdict.action == "resync":
            self.publish(step + 1)
            self.feed.renew(self.version)
            self.feed.verdicts.resync_since(step + 1)
        if (step + 1) % SAVE_EVERY == 0:
            self.feed.durable()
        self.follower.update()


def measure(steps: int, samplers: int) -> float:
    """The growth in MiB per 1,000 steps after the first 2,000; prints a line per 1,000 steps."""
    logging.disable(logging.WARNING)
    with EmbeddedRedis() as server, tempfile.TemporaryDirectory() as out:
        client = connect(server.url)
        run = SimulatedRun(client, Path(out), steps, samplers)
        print(f"{samplers} samplers; a status has {run.heartbeats(0)} bytes")
        tracemalloc.start()
        marks: list[float] = []
        for step in range(steps):
            run.step(step)
            if (step + 1) % EVERY == 0:
                gc.collect()
                traced = tracemalloc.get_traced_memory()[0] / MIB
                rss = psutil.Process().memory_info().rss / MIB
                used = client.info("memory")["used_memory"] / MIB
                grown = traced - marks[-1] if marks else float("nan")
                marks.append(traced)
                print(
                    f"{step + 1:6d} steps: {traced:7.2f} MiB allocated ({grown:+.3f}), "
                    f"process {rss:.0f} MiB, server {used:.1f} MiB",
                    flush=True,
                )
        client.close()
    after = marks[min(1, len(marks) - 1) :]
    return (after[-1] - after[0]) / max(1, len(after) - 1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--samplers", type=int, default=64)
    args = parser.parse_args()
    growth = measure(args.steps, args.samplers)
    print(f"growth: {growth:.3f} MiB per {EVERY} steps, limit {LIMIT_MIB} MiB")
    return int(growth > LIMIT_MIB)


if __name__ == "__main__":
    sys.exit(main())
