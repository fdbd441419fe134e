"""Identity of a configuration: the settings that change a draw, a reward or a batch, and their digest.

Controller, trainer and samplers of a run must agree on these. The digest is in tickets, rollouts, manifests,
statuses and reports, so that what was made under another configuration is never mixed in: while a run is
upgraded, some of its processes still have the old one.

    COUNTED   changes a draw, a reward or a batch
    FREE      does not: services may differ in it

Every key of every section is in one of the two (a test compares them with the models). Of the section `task`,
whose keys depend on the kind, everything counts but TASK_FREE; of a file of items it is the content, not the
path. The code of rewards and tasks and the files of the model are not covered.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import xxhash

from leeway.config.run import RunConfig
from leeway.errors import UsageError

COUNTED: dict[str, tuple[str, ...]] = {
    "": ("seed",),
    "model": ("name", "params", "max_length", "trust_remote_code"),
    "sampling": (
        "temperature", "top_p", "top_k", "min_p", "max_new_tokens", "head_tokens", "head_eps",
    ),
    "batch": ("prompts", "group_size", "order_seed"),
    "sampler": ("dtype", "tensor_parallel_size", "enforce_eager", "engine_args"),
    "weights": ("dtype",),
}  # fmt: skip
"""Section -> keys that count; "" holds the keys of no section."""
FREE: dict[str, tuple[str, ...]] = {
    "": ("name",),
    "sync": (
        "ess_threshold", "ess_level", "clip_fraction", "max_age", "every_n", "policies", "max_lead",
        "verdict_timeout_s", "commit_timeout_s", "heartbeat_s", "ticket_idle_s", "stall_timeout_s",
    ),
    "sampler": (
        "replicas", "max_num_seqs", "gpu_memory_utilization", "cpu_kv_cache_gib", "cpu_threads", "http_host",
        "http_port", "drain_s", "start_timeout_s", "stall_timeout_s", "max_restarts", "max_deliveries",
    ),
    "trainer": (
        "steps", "ranks", "device", "dtype", "zero_stage", "learning_rate", "lr_schedule", "warmup_steps",
        "weight_decay", "betas", "max_grad_norm", "micro_batch_tokens", "logits_chunk_tokens",
        "gradient_checkpointing", "cpu_threads", "checkpoint_every", "keep_checkpoints", "deepspeed",
        "max_restarts",
    ),
    "weights": (
        "chunk_bytes", "transport", "nccl_address", "nccl_port", "keyframe_every", "max_redis_mib",
    ),
    "redis": (
        "url", "service_urls", "read_urls", "maxmemory_mib", "appendonly", "socket_timeout_s", "reconnect_s",
    ),
    "telemetry": ("log_level", "log_format", "otlp_endpoint", "metrics_host", "metrics_port"),
    "checks": (
        "enabled", "sample_fraction", "probe_draws", "self_prefix_responses", "self_prefix_every",
    ),
    "output": ("dir", "save_model", "save_batches"),
}  # fmt: skip
"""Section -> keys that do not count. `sync` decides which version a batch is drawn under, and the trainer how
it is trained on: controller and trainer alone read them, and nothing is mixed when they differ."""
FREE_SECTIONS = ("correction",)
"""Sections without a counted key whose keys depend on what is chosen; the trainer alone uses them."""
TASK_FREE = ("reward_workers",)
"""Keys of the section `task` that do not count."""
SHORT = 8
"""Hex digits of a digest that are shown to people."""


@dataclass(frozen=True)
class Identity:
    """`text`: the counted settings as canonical JSON, dotted key -> value."""

    text: str

    @cached_property
    def digest(self) -> str:
        """32 hex digits; "" for no configuration at all, which is no one's."""
        return xxhash.xxh3_128_hexdigest(self.text.encode()) if self.text else ""

    def differences(self, other: Identity) -> list[str]:
        """Dotted keys in which the two differ; none if one of them cannot be read."""
        mine, theirs = _parse(self.text), _parse(other.text)
        if not mine or not theirs:
            return []
        absent = object()
        return sorted(k for k in mine.keys() | theirs.keys() if mine.get(k, absent) != theirs.get(k, absent))


NOTHING = Identity("")
"""The identity of no configuration."""


def identify(config: RunConfig) -> Identity:
    """The identity of a configuration.

    Files of the task are read once per process: like the items, they are those of its start. Raises
    UsageError for one that cannot be read.
    """
    values = dict(_counted(config))
    return Identity(json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False))


def short(digest: str) -> str:
    """A digest as it is shown to people."""
    return digest[:SHORT] or "none"


def name_keys(keys: Sequence[str]) -> str:
    """` (differs in a, b)` for a message; empty if no keys are known."""
    return f" (differs in {', '.join(keys)})" if keys else ""


def _counted(config: RunConfig) -> Iterator[tuple[str, Any]]:
    data: dict[str, Any] = config.model_dump(mode="json")
    for section, keys in COUNTED.items():
        values = data[section] if section else data
        prefix = f"{section}." if section else ""
        yield from ((f"{prefix}{key}", values[key]) for key in keys)
    files = config.task.files
    for key, value in data["task"].items():
        if key not in TASK_FREE and not (isinstance(value, str) and Path(value) in files):
            yield f"task.{key}", value
    if files:
        yield "task.files", [_content(path) for path in files]


@cache
def _content(path: Path) -> str:
    """Digest of a file's content."""
    state = xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                state.update(block)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}; every service reads it, because its content is part "
            "of the identity of the configuration"
        ) from error
    return state.hexdigest()


def _parse(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
