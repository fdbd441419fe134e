"""Settings that are given and that nothing reads, because of another setting.

A key of another task kind or of another correction is an error (leeway.config.explain). Here are keys that
are valid by themselves: `weights.nccl_port` while `weights.transport` is redis. One row of RULES for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from leeway.config.run import RunConfig

MISSING = object()


@dataclass(frozen=True)
class _Surroundings:
    """What else decides whether a setting is read. `gpu`: None if it is not known."""

    gpu: bool | None
    environ: Mapping[str, str]


@dataclass(frozen=True)
class _Rule:
    """`keys` are not read if `applies`; `why` is the reason, a format string with `c`, the RunConfig."""

    keys: str
    applies: Callable[[RunConfig, _Surroundings], bool]
    why: str


def _always_resyncs(c: RunConfig) -> bool:
    return c.sync.max_age == 1 or c.sync.every_n == 1


def _correction(key: str, value: object) -> Callable[[RunConfig, _Surroundings], bool]:
    """True if the correction has `key` with another value than `value`."""
    return lambda c, _: getattr(c.correction, key, value) != value


def _engine_arg(name: str) -> Callable[[RunConfig, _Surroundings], bool]:
    return lambda c, _: name in c.sampler.engine_args


def _variable(name: str) -> Callable[[RunConfig, _Surroundings], bool]:
    return lambda _, around: bool(around.environ.get(name))


RULES = [
    _Rule(
        "model.trust_remote_code",
        lambda c, _: c.model.name in ("tiny", "smollm2-135m-instruct"),
        "model.name={c.model.name} is built in and has no code of its own",
    ),
    _Rule(
        "task.reward_env",
        lambda c, _: c.task.reward in ("exact", "last_number", "verifier"),
        "task.reward={c.task.reward} reads no environment variable",
    ),
    _Rule(
        "sampling.head_eps",
        lambda c, _: c.sampling.head_tokens == 0,
        "sampling.head_tokens=0 reports no head",
    ),
    _Rule(
        "sampling.head_tokens sampling.head_eps",
        lambda c, _: not (c.correction.needs_head or c.sampling.truncated or c.checks.enabled),
        "correction.method={c.correction.method} as it is set reads no head, and checks.enabled=false",
    ),
    _Rule(
        "correction.std_floor",
        lambda c, _: c.correction.advantage != "grpo",
        "correction.advantage={c.correction.advantage} does not divide by a standard deviation",
    ),
    _Rule(
        "correction.head_tail",
        lambda c, _: not c.correction.needs_head,
        "correction.method={c.correction.method} as it is set subtracts no centre",
    ),
    _Rule(
        "correction.clamp_low correction.clamp_high",
        _correction("lag_clip", "clamp"),
        "they are read with correction.lag_clip=clamp",
    ),
    _Rule(
        "correction.prox_logp_method correction.behave_weight_cap",
        _correction("variant", "areal"),
        "correction.variant={c.correction.variant} has no proximal policy; they are read with areal",
    ),
    _Rule(
        "correction.dual_clip",
        _correction("variant", "repo"),
        "it is read with correction.variant=repo",
    ),
    _Rule(
        "sync.ess_level",
        lambda c, _: c.sync.ess_threshold is None,
        "sync.ess_threshold is null",
    ),
    _Rule(
        "sync.ess_threshold sync.ess_level sync.clip_fraction sync.policies",
        lambda c, _: _always_resyncs(c),
        "sync.max_age={c.sync.max_age}, sync.every_n={c.sync.every_n} resyncs after every step anyway",
    ),
    _Rule(
        "sync.every_n",
        lambda c, _: c.sync.max_age == 1,
        "sync.max_age=1 resyncs after every step",
    ),
    _Rule(
        "sync.max_age",
        lambda c, _: c.sync.every_n == 1 and c.sync.max_age != 1,
        "sync.every_n=1 resyncs after every step",
    ),
    _Rule(
        "sampler.cpu_kv_cache_gib",
        lambda _, around: around.gpu is True,
        "there is a GPU, and the engine runs on it",
    ),
    _Rule(
        "sampler.gpu_memory_utilization",
        lambda _, around: around.gpu is False,
        "there is no GPU, and the engine runs on the CPU",
    ),
    *(
        _Rule(f"sampler.{name}", _engine_arg(name), f"sampler.engine_args sets {name}")
        for name in (
            "dtype",
            "max_num_seqs",
            "tensor_parallel_size",
            "gpu_memory_utilization",
            "enforce_eager",
        )
    ),
    _Rule(
        "sampler.cpu_kv_cache_gib",
        _variable("VLLM_CPU_KVCACHE_SPACE"),
        "the environment variable VLLM_CPU_KVCACHE_SPACE takes precedence",
    ),
    _Rule(
        "sampler.cpu_threads",
        _variable("OMP_NUM_THREADS"),
        "the environment variable OMP_NUM_THREADS takes precedence",
    ),
    _Rule(
        "sampler.http_host",
        lambda c, _: c.sampler.http_port == 0,
        "sampler.http_port=0: there is no server",
    ),
    _Rule(
        "weights.nccl_address weights.nccl_port",
        lambda c, _: c.weights.transport == "redis",
        "weights.transport=redis",
    ),
    _Rule(
        "weights.chunk_bytes weights.keyframe_every weights.max_redis_mib redis.read_urls",
        lambda c, _: c.weights.transport == "nccl",
        "weights.transport=nccl does not send weights through Redis",
    ),
    _Rule(
        "redis.maxmemory_mib redis.appendonly",
        lambda c, _: c.redis.url is not None,
        "redis.url is given: they are settings of the run's own server",
    ),
    _Rule(
        "telemetry.otlp_endpoint",
        _variable("OTEL_EXPORTER_OTLP_ENDPOINT"),
        "the environment variable OTEL_EXPORTER_OTLP_ENDPOINT takes precedence",
    ),
    _Rule(
        "checks.sample_fraction checks.probe_draws",
        lambda c, _: not c.checks.enabled,
        "checks.enabled=false",
    ),
    _Rule(
        "checks.self_prefix_every",
        lambda c, _: c.checks.self_prefix_responses == 0,
        "checks.self_prefix_responses=0",
    ),
]


def unread_settings(
    config: RunConfig, *, gpu: bool | None = None, environ: Mapping[str, str] | None = None
) -> list[str]:
    """One line for each setting that differs from its default and has no effect, with the reason.

    `gpu`: whether the samplers run on a GPU, None if that is not known. `environ`: the environment of the
    services, whose variables take precedence over some settings.
    """
    around = _Surroundings(gpu, environ or {})
    found: dict[str, str] = {}
    for rule in RULES:
        if not rule.applies(config, around):
            continue
        for path in rule.keys.split():
            value, default = _value_and_default(config, path)
            # null turns something off, which needs no effect.
            if value not in (MISSING, None, default) and path not in found:
                found[path] = f"{path}={_shown(path, value)} has no effect: {rule.why.format(c=config)}"
    return list(found.values())


def _value_and_default(config: RunConfig, path: str) -> tuple[Any, Any]:
    """MISSING twice if the section has no such key."""
    section, key = path.split(".")
    model: BaseModel = getattr(config, section)
    field = type(model).model_fields.get(key)
    if field is None:
        return MISSING, MISSING
    return getattr(model, key), field.get_default(call_default_factory=True)


def _shown(path: str, value: object) -> str:
    text = "***" if path.endswith("_urls") else str(value)  # an address may hold a password
    return text if len(text) <= 80 else f"{text[:80]}..."
