"""Entry point of group `vllm.general_plugins`: vLLM loads it in every process that it starts."""

from __future__ import annotations

import os

from leeway.process import die_with_parent

BACKEND = "redis"
OWNER_ENV = "_LEEWAY_ENGINE_OWNER"
"""Process id of the sampler that owns the engine processes below it."""


def register() -> None:
    """Make the weight-transfer backend `redis` known, and let engine processes end with their sampler.

    May be called any number of times in a process.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "leeway_sampler.weight_engine", "RedisWeightTransferEngine"
        )
    _end_with_owner()


def _end_with_owner() -> None:
    # A sampler that is killed cannot stop its engine, which would keep its cores or its GPU for ever.
    owner = os.environ.get(OWNER_ENV)
    if owner is not None and os.getpid() != int(owner):
        die_with_parent()
