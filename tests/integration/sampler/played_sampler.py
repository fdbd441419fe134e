"""A sampler process without vLLM: the real loop, and an engine that takes a while for each response.

    played_sampler.py URL RUN NAME CONFIG SECONDS VICTIM

CONFIG: the configuration as JSON. VICTIM: the ticket that kills the process while it is drawn, or "-".
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

from leeway.config.load import build_config
from leeway.errors import LeewayError
from leeway.rewards import RewardResult
from leeway.streams import Keys, connect
from leeway_sampler.generation import Generation
from leeway_sampler.serve import Sampler
from leeway_sampler.weight_update import NOTHING, loaded_from


class Weights:
    """Every version is loaded at once."""

    stage_s = pause_s = fetched_at = 0.0
    pausing = False

    def __init__(self) -> None:
        self.loaded = NOTHING

    async def apply(self, manifest: Any, **_: object) -> str:
        self.loaded = loaded_from(manifest)
        return self.loaded.digest


class Engine:
    logprobs_mode, bans, drawn, inflight = "processed_logprobs", (), 0, 0

    def __init__(self, seconds: float, victim: str) -> None:
        self.seconds, self.victim, self.weights = seconds, victim, Weights()

    @property
    def version(self) -> int | None:
        return self.weights.loaded.version

    def healthy(self) -> bool:
        return True

    async def abort_all(self) -> None:
        pass

    async def generate(self, request_id: str, *_: object) -> Generation:
        await asyncio.sleep(self.seconds)
        if request_id.split("#")[0] == self.victim:
            os.kill(os.getpid(), signal.SIGKILL)
        ids, logp = np.array([3], np.int32), np.array([-1.0], np.float32)
        return Generation(ids, logp, np.array([0, 1], np.int32), ids, logp, "stop", ((0, 1, 1),), False)


async def score(item: int, text: str) -> RewardResult:
    return RewardResult(1.0)


async def serve(url: str, run: str, name: str, config: str, seconds: str, victim: str) -> None:
    engine: Any = Engine(float(seconds), victim)
    rewards: Any = SimpleNamespace(score=score)
    made = Sampler(
        connect(url), Keys(run), build_config(json.loads(config)), engine, rewards, lambda ids: "", name
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, made.stop)
    await made.run()


if __name__ == "__main__":
    try:
        asyncio.run(serve(*sys.argv[1:]))
    except LeewayError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
