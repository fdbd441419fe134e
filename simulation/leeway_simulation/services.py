"""The three services as their processes start them, on simulated connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
import torch

from leeway.checkpoints.state import has_checkpoint
from leeway.config import RunConfig
from leeway.config.load import build_config
from leeway.diagnose import tell_start
from leeway.streams import Keys, client_name, connect
from leeway_controller.reconcile import Controller
from leeway_sampler.serve import Sampler
from leeway_sampler.transports.base import Endpoint
from leeway_simulation.engine import InstantEngine, InstantRewards
from leeway_simulation.learner import learner_of
from leeway_simulation.loop import run_async
from leeway_simulation.scheduler import Process, Simulation
from leeway_trainer.epochs import TrainerSetup
from leeway_trainer.process import tell_failure
from leeway_trainer.ranks import Ranks
from leeway_trainer.train import Trainer

RUN = "simulated"
URL = "unix:///simulated"
ITEMS = 7
START_S = 1.0
"""Longest time that a service takes to load its model."""


def simulated_config(seed: int) -> RunConfig:
    """The configuration of history `seed`: short timeouts, so that durations of faults exceed them."""
    return build_config(
        {
            "seed": seed % 1000,
            "task": {"kind": "digits"},
            "batch": {"prompts": 2, "group_size": 2},
            "trainer": {"steps": 3, "checkpoint_every": 2, "dtype": "float32", "device": "cpu"},
            "sampler": {"max_num_seqs": 2 + seed % 3, "drain_s": 3, "start_timeout_s": 60},
            "sync": {
                "max_lead": seed % 3,
                "max_age": 2,
                "heartbeat_s": 2,
                "ticket_idle_s": 6,
                "verdict_timeout_s": 3,
                "commit_timeout_s": 6,
                "stall_timeout_s": 150,
            },
            "redis": {"reconnect_s": 10, "socket_timeout_s": 1},
            "weights": {"keyframe_every": 3, "chunk_bytes": 1 << 16},
            "checks": {
                "enabled": False,
                "probe_draws": 0,
                "self_prefix_responses": 2,
                "self_prefix_every": 2,
            },
            "output": {"save_model": False},
        }
    )


def encode_item(item: int) -> list[int]:
    """The prompt of an item, as token ids."""
    return [item + 1, item + 2]


@dataclass(frozen=True)
class Place:
    """Where services run. `problem`: told about what must not happen."""

    simulation: Simulation
    config: RunConfig
    out: Path
    problem: Callable[[str], None]

    @property
    def keys(self) -> Keys:
        return Keys(RUN)

    def connect(self, service: str) -> redis.Redis:
        """As every service connects."""
        timeouts = self.config.redis
        return connect(
            URL,
            socket_timeout_s=timeouts.socket_timeout_s,
            wait_s=timeouts.reconnect_s,
            name=client_name(RUN, service),
        )

    def load_model(self) -> None:
        """Take as long as loading a model might."""
        self.simulation.sleep(START_S * self.simulation.rng.random())


def run_controller(place: Place, process: Process) -> None:
    """What `leeway_controller.service.serve` does, without the election: two controllers are a fault."""
    client = place.connect("controller")
    process.service = Controller(client, place.keys, place.config, encode_item, ITEMS)
    process.service.run()


def run_trainer(place: Place, process: Process) -> None:
    """What `leeway_trainer.process.train` does, on one rank."""
    client = place.connect("trainer")
    tell_start(client, place.keys, "trainer", place.config.redis.reconnect_s)
    place.load_model()
    ranks = Ranks(0, 1, torch.device("cpu"), None)  # type: ignore[arg-type]  # one rank needs no group
    resume = place.out if has_checkpoint(place.out) else None
    setup = TrainerSetup("few-numbers", place.out, place.keys, client, resume)
    try:
        load = learner_of(place.simulation.sleep, place.problem)
        process.service = Trainer(place.config, ranks, setup, load)
        process.service.run()
    except Exception as error:
        tell_failure(client, place.keys, error)
        raise


def run_sampler(place: Place, process: Process) -> None:
    """What `leeway_sampler.__main__` does."""
    client = place.connect(process.name)
    tell_start(client, place.keys, process.name, place.config.redis.reconnect_s)
    place.load_model()

    async def serve() -> None:
        endpoint = Endpoint(place.config, URL, RUN, process.name)
        engine: Any = await InstantEngine.start(place.simulation, endpoint)
        rewards: Any = InstantRewards(place.config)
        sampler = Sampler(client, place.keys, place.config, engine, rewards, lambda ids: "", process.name)
        process.service = sampler
        process.state["loop"] = asyncio.get_running_loop()
        await sampler.run()
        engine.weights.receiver.close()

    run_async(place.simulation, serve)


MAINS = {"controller": run_controller, "trainer": run_trainer, "sampler": run_sampler}


def stop(process: Process) -> None:
    """As SIGTERM does."""
    if process.service is None:
        return
    if process.role == "sampler":
        loop = process.state["loop"]
        if not loop.is_closed():
            loop.call_soon_threadsafe(process.service.stop)
    elif process.role == "controller":
        process.service.stop()
    else:
        process.service.stopping = True
