"""The sampler's engine, replaced at its edge: weights arrive by the real transport, responses are computed.

real       the queue of manifests, the host copy, attestations, pause, abort and resume around a load
replaced   vLLM: `draw` instead of a model, a moment of virtual time instead of a generation
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from leeway.config import RunConfig
from leeway.messages import draw_digest
from leeway.rewards.pool import RewardResult
from leeway.weights import WeightManifest
from leeway_sampler.engine import EngineError, GenerationAborted
from leeway_sampler.generation import Generation
from leeway_sampler.transports.base import Endpoint
from leeway_sampler.transports.kinds.redis import RedisReceiver
from leeway_sampler.weight_update import EngineWeights
from leeway_simulation.numbers import draw, weights_name
from leeway_simulation.scheduler import Simulation

LONGEST_S = 1.5
"""Longest generation."""
LOAD_S = 0.2


class InstantReceiver(RedisReceiver):
    """The transport `redis`; the engine takes the weights from the host copy."""

    async def load(self, llm: Any, manifest: WeightManifest) -> None:
        await asyncio.sleep(LOAD_S)
        assert self.copy.held is not None
        words = [self.copy.tensor_words(spec).tobytes() for spec in self.copy.held.tensors]
        llm.weights = weights_name(words)


class InstantModel:
    """What `EngineWeights` needs of vLLM."""

    def __init__(self) -> None:
        self.weights = b""
        self.requests: set[asyncio.Future[None]] = set()
        self.running = asyncio.Event()
        self.running.set()

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        """Abort what is in progress; nothing new begins."""
        self.running.clear()
        self.abort()

    async def resume_generation(self) -> None:
        self.running.set()

    async def reset_prefix_cache(self) -> bool:
        return True

    async def finish_weight_update(self) -> None:
        return

    def abort(self) -> None:
        """Abort what is in progress."""
        for request in self.requests:
            if not request.done():
                request.set_result(None)


class InstantEngine:
    """In the place of `leeway_sampler.engine.SamplerEngine`."""

    logprobs_mode = "processed_logprobs"

    def __init__(self, simulation: Simulation, receiver: InstantReceiver) -> None:
        self._simulation = simulation
        self._model: Any = InstantModel()
        self.weights = EngineWeights(self._model, "redis", receiver)
        self.bans: list[str] = []
        self.drawn = 0
        """Tokens drawn since the start."""

    @classmethod
    async def start(cls, simulation: Simulation, endpoint: Endpoint) -> InstantEngine:
        """Connect the receiver, as an engine does at its start."""
        return cls(simulation, await asyncio.to_thread(InstantReceiver.connect, endpoint))  # type: ignore[arg-type]

    @property
    def version(self) -> int | None:
        return self.weights.loaded.version

    @property
    def inflight(self) -> int:
        return len(self._model.requests)

    def healthy(self) -> bool:
        return True

    async def generate(
        self, request_id: str, prompt_ids: list[int], seed: int, max_new_tokens: int
    ) -> Generation:
        """The response to a ticket, after a moment. Raises EngineError and GenerationAborted."""
        if self.version is None:
            raise EngineError(f"request {request_id}: the engine holds no complete weight version")
        await self._model.running.wait()
        version, tokens = self.version, draw(seed, self._model.weights)
        request = asyncio.get_running_loop().create_future()
        self._model.requests.add(request)
        try:
            done, _ = await asyncio.wait([request], timeout=LONGEST_S * self._simulation.rng.random() ** 3)
        finally:
            self._model.requests.discard(request)
        self.drawn += tokens.size
        if done:
            raise GenerationAborted(f"request {request_id} was aborted", 1)
        if version is None:
            raise EngineError(f"request {request_id}: the engine holds no complete weight version")
        return as_generation(tokens, version)

    async def abort_all(self, budget_s: float = 10.0) -> None:
        self._model.abort()
        await asyncio.sleep(0)


def as_generation(tokens: Any, version: int) -> Generation:
    """Tokens that were certain, drawn under `version` alone."""
    count = tokens.size
    logp = np.zeros(count, dtype=np.float32)
    return Generation(
        token_ids=tokens,
        logp=logp,
        head_offsets=np.arange(count + 1, dtype=np.int32),
        head_ids=tokens,
        head_logp=logp,
        finish_reason="stop",
        spans=((0, count, version),),
        support_complete=True,
        digest=draw_digest(tokens, logp),
    )


class InstantRewards:
    """In the place of the pool of reward processes."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    async def score(self, item: int, response: str) -> RewardResult:
        return RewardResult(float(item % 2))
