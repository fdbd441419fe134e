"""How much memory and disk a run needs, from its configuration and the size of its model."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from leeway.config import RunConfig

MIB, GIB = 1 << 20, 1 << 30
WIDTH = {"bfloat16": 2, "float32": 4}
"""Bytes per element."""
TRAINER_BASE, SAMPLER_BASE, CONTROLLER_BASE, SCORER_BASE = 1 * GIB, 1.5 * GIB, 256 * MIB, 256 * MIB
"""Memory of a process without model: interpreter, torch, vLLM."""
LOGS = 64 * MIB
ROW = 8 << 10
"""Bytes of a line in metrics.jsonl, generously."""


@dataclass(frozen=True)
class Part:
    """One line of an estimate."""

    what: str
    nbytes: float


def total(parts: list[Part]) -> float:
    return sum(part.nbytes for part in parts)


def show_parts(parts: list[Part]) -> str:
    """`3.0 GiB = checkpoints 2.5 GiB + export 0.5 GiB`"""
    return f"{show_size(total(parts))} = " + " + ".join(f"{p.what} {show_size(p.nbytes)}" for p in parts)


def show_size(nbytes: float) -> str:
    """Bytes as MiB or GiB."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.0f} MiB"


def disk_parts(config: RunConfig, parameters: int) -> list[Part]:
    """What the output directory holds at its fullest.

    A checkpoint has 12 bytes per parameter (float32 weights and two moments), in bfloat16 2 more. The next
    one is complete before the oldest is deleted.
    """
    trainer, output = config.trainer, config.output
    per_parameter = 12 if trainer.dtype == "float32" else 14
    written = ceil(trainer.steps / trainer.checkpoint_every) if trainer.checkpoint_every else 1
    count = min(written, trainer.keep_checkpoints + 1)
    parts = [
        Part(
            f"{count} checkpoint{'s' * (count > 1)} of {per_parameter} B x {parameters / 1e6:.1f} M",
            count * per_parameter * parameters,
        )
    ]
    if output.save_model:
        parts.append(Part("the exported model", WIDTH[trainer.dtype] * parameters))
    batches = len([step for step in set(output.save_batches) if step < trainer.steps])
    if batches:
        parts.append(Part(f"{batches} saved batches", batches * 2 * WIDTH[config.weights.dtype] * parameters))
    parts.append(Part("logs and metrics", LOGS + ROW * trainer.steps))
    return parts


def trainer_bytes(config: RunConfig, parameters: int) -> float:
    """Weights, float32 gradients and optimiser state of all ranks together; bfloat16 has ZeRO stage 1."""
    trainer = config.trainer
    bf16 = trainer.dtype == "bfloat16"
    stage = max(1, trainer.zero_stage) if bf16 else trainer.zero_stage
    weights, grads, optimizer = WIDTH[trainer.dtype], 4, 12 if bf16 else 8
    shared = [stage >= 3, stage >= 2, stage >= 1]
    per_rank = zip((weights, grads, optimizer), shared, strict=True)
    return parameters * sum(width * (1 if one else trainer.ranks) for width, one in per_rank)


def memory_parts(config: RunConfig, parameters: int, *, accelerator: bool) -> list[Part]:
    """Main memory of all processes of the run; models on an accelerator do not count."""
    trainer, sampler = config.trainer, config.sampler
    published = 2 * WIDTH[config.weights.dtype] * parameters
    own_redis = 0.0 if config.redis.url else redis_bytes(config, parameters)
    on_gpu = accelerator and trainer.device != "cpu"
    model = 0.0 if on_gpu else trainer_bytes(config, parameters)
    engine = 0.0 if accelerator else WIDTH[sampler.dtype] * parameters + sampler.cpu_kv_cache_gib * GIB
    scorers = sampler.replicas * config.task.reward_workers
    return [
        Part("trainer", trainer.ranks * TRAINER_BASE + model),
        Part("two copies of the published weights", published),
        Part(
            f"{sampler.replicas} sampler{'s' * (sampler.replicas > 1)}",
            sampler.replicas * (SAMPLER_BASE + engine),
        ),
        Part("reward processes", scorers * SCORER_BASE),
        Part("controller", CONTROLLER_BASE),
        *([Part("Redis", own_redis)] if own_redis else []),
    ]


def redis_bytes(config: RunConfig, parameters: int) -> float:
    """Memory of the server: two whole versions with the deltas between them, and the responses in flight.

    Every token of a response carries its id and log-probability (12 bytes) and the head's (6 bytes each).
    """
    per_token = 12 + 6 * config.sampling.head_tokens
    batches = config.sync.max_lead + 2
    flight = batches * config.batch.size * config.sampling.max_new_tokens * per_token
    return keyframes_bytes(config, parameters) + flight


def keyframes_bytes(config: RunConfig, parameters: int) -> float:
    """Memory for weights: two whole versions and deltas; none if weights do not travel through Redis."""
    if config.weights.transport != "redis":
        return 0.0
    return 2.1 * WIDTH[config.weights.dtype] * parameters
