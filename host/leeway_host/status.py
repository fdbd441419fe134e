"""The state of a run, from its keys in Redis and, in a cluster, from its pods. For `leeway status`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import redis

from leeway.config.identity import NOTHING, Identity, name_keys, short
from leeway.kube import PodView
from leeway.messages import MessageError, Report, SamplerStatus, decode
from leeway.metrics import status_metrics
from leeway.run_state import RunState
from leeway.statuses import read_statuses
from leeway.streams import CONFIG_FIELD, CONTROLLER_CONFIG_FIELD, Keys, now

BUDGET_S = 5.0


@dataclass(frozen=True)
class RunStatus:
    """`current`: the version that samplers have loaded; None before the first. `step`: finished steps."""

    run: str
    known: bool
    epoch: int = -1
    step: int = 0
    current: int | None = None
    pending: int | None = None
    awaiting: int | None = None
    finished: bool = False
    tickets: int = 0
    config: Identity = NOTHING
    """The configuration of the run epoch, which is the trainer's."""
    controller_config: Identity = NOTHING
    samplers: list[SamplerStatus] = field(default_factory=list)
    metrics: dict[str, float | str | None] = field(default_factory=dict)

    @property
    def going(self) -> bool:
        """At least one sampler has loaded published weights, or the run is finished."""
        return self.finished or (self.current is not None and any(s.ready for s in self.samplers))


def read_status(client: redis.Redis, keys: Keys) -> RunStatus:
    """Read the state of a run. Raises RedisError, RedisUnavailable, MessageError."""
    if not client.exists(keys.state):
        return RunStatus(run=keys.run, known=False)
    state = RunState.load(client, keys, budget_s=BUDGET_S)
    texts = cast(Any, client.hmget(keys.state, [CONFIG_FIELD, CONTROLLER_CONFIG_FIELD]))
    config, controller_config = (Identity((text or b"").decode()) for text in texts)
    return RunStatus(
        run=keys.run,
        known=True,
        epoch=state.epoch,
        step=state.next_step,
        current=state.current,
        pending=state.pending,
        awaiting=state.awaiting,
        finished=state.finished,
        tickets=int(cast(Any, client.xlen(keys.tickets))),
        config=config,
        controller_config=controller_config,
        samplers=read_statuses(client, keys, budget_s=BUDGET_S),
        metrics=_last_metrics(client, keys),
    )


def _last_metrics(client: redis.Redis, keys: Keys) -> dict[str, float | str | None]:
    for _, fields in cast(Any, client.xrevrange(keys.reports, count=10)):
        try:
            header = decode(Report, fields).header
        except MessageError:
            continue
        if header.event == "step":
            return {name: header.metrics[name] for name in status_metrics() if name in header.metrics}
    return {}


def describe(status: RunStatus | None, pods: Sequence[PodView] | None) -> list[str]:
    """The status as lines of text."""
    lines = [] if status is None else _describe_run(status)
    for pod in pods or ():
        state = "ready" if pod.ready else "not ready"
        restarts = f", {pod.restarts} restarts" if pod.restarts else ""
        reason = f": {pod.reason}" if pod.reason else ""
        lines.append(f"pod {pod.name}  {pod.phase}, {state}{restarts}{reason}")
    if pods is not None and not pods:
        lines.append("no pods")
    return lines


def _describe_run(status: RunStatus) -> list[str]:
    if not status.known:
        return [f"run {status.run}: not on this server; neither controller nor trainer has started"]
    what = "finished" if status.finished else "training" if status.current is not None else "starting"
    lines = [f"run {status.run}: {what}, {status.step} steps done (run epoch {status.epoch})"]
    version = "none yet" if status.current is None else str(status.current)
    waits = [
        f"waiting for version {status.awaiting} from the trainer" if status.awaiting is not None else "",
        f"samplers are loading version {status.pending}" if status.pending is not None else "",
    ]
    lines.append("; ".join([f"weights: version {version}", *filter(None, waits)]))
    lines.append(f"tickets: {status.tickets} queued or in progress")
    lines += _describe_configs(status)
    if status.metrics:
        lines.append("last step: " + "  ".join(_metric(k, v) for k, v in status.metrics.items()))
    for sampler in status.samplers:
        ready = "ready" if sampler.ready else "not ready"
        error = f": {sampler.error}" if sampler.error else ""
        lines.append(
            f"sampler {sampler.sampler}  {ready}, version {sampler.version}, {sampler.inflight} in flight, "
            f"{sampler.tickets} done, heartbeat {now() - sampler.heartbeat:.0f} s ago{error}"
        )
    if not status.samplers:
        lines.append("no sampler has joined")
    return lines


def _describe_configs(status: RunStatus) -> list[str]:
    """The run's configuration by its digest, and those that differ from it."""
    if not status.config.text:
        return []
    lines = [f"configuration: {short(status.config.digest)} (the trainer's)"]
    controller = status.controller_config
    if controller.text and controller.digest != status.config.digest:
        keys = name_keys(controller.differences(status.config))
        lines.append(f"the controller has {short(controller.digest)}{keys} and issues no tickets")
    lines += [
        f"sampler {sampler.sampler} has {short(sampler.config)}{name_keys(sampler.config_differs)} and takes "
        "no tickets"
        for sampler in status.samplers
        if sampler.config != status.config.digest
    ]
    return lines


def _metric(name: str, value: float | str | None) -> str:
    return f"{name} {value:.4g}" if isinstance(value, (int, float)) else f"{name} {value}"


def as_json(status: RunStatus | None, pods: Sequence[PodView] | None) -> str:
    """The status as one JSON object."""
    run = asdict(status) if status else None
    if run is not None and status is not None:
        run["samplers"] = [s.model_dump() for s in status.samplers]
        run["config"] = status.config.digest
        run["controller_config"] = status.controller_config.digest
    return json.dumps({"run": run, "pods": None if pods is None else [asdict(pod) for pod in pods]})
