"""A sampler's status: its heartbeat and the weights it attests. Stored by `leeway.statuses`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leeway.messages.headers import MessageError


class Probe(BaseModel):
    """Draws after one fixed prefix, compared with the distribution that the engine reported for it."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    request: int = 0
    """The newest request that this probe answers; the key `probe` counts requests."""
    version: int = -1
    draws: int = 0
    chi2: float = 0.0
    dof: int = 0
    """Degrees of freedom; 0 if the distribution is too peaked to be tested."""
    example: str = ""
    """The token with the largest deviation."""


class SamplerStatus(BaseModel):
    """A sampler's entry in the hash `samplers`: its heartbeat and what it attests."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    sampler: str
    heartbeat: float
    """Unix time, seconds."""
    ready: bool = False
    epoch: int = -1
    version: int = -1
    digest: str = ""
    """Digest of the weights that are loaded."""
    config: str = ""
    """Digest of the sampler's configuration (`leeway.config.identity`)."""
    config_differs: list[str] = Field(default_factory=list)
    """Keys in which it differs from the run's configuration, if it does and they are known."""
    inflight: int = 0
    busy_s: float = 0.0
    """Seconds with at least one response in flight, since the sampler's start."""
    uptime_s: float = 0.0
    tokens: int = 0
    """Tokens generated since the sampler's start."""
    tokens_voided: int = 0
    """The part of `tokens` that belongs to discarded responses."""
    tickets: int = 0
    """Responses published since the sampler's start."""
    stage_s: float = 0.0
    """Seconds spent on reading and verifying the last version while the engine kept generating."""
    pause_s: float = 0.0
    """Seconds that generation was paused to load it."""
    fetched_at: float = 0.0
    """Unix time when a part of a version last arrived, by the server's clock; 0: never."""
    stuck: tuple[int, int] | None = None
    """(epoch, version) that cannot be assembled from what is published: only a keyframe helps."""
    fenced: bool = False
    """The controller fenced this sampler: it takes no tickets until it has reloaded the current version."""
    passed: str = ""
    """The last fence after which it reloaded the weights."""
    bad_logprobs: int = 0
    """Responses that were discarded because of invalid log-probabilities."""
    logprobs_mode: str = ""
    """The engine's `logprobs_mode`."""
    bans: list[str] = Field(default_factory=list)
    """Active sampling settings that ban or bias tokens."""
    probe: Probe | None = None
    """The last probe of the engine's distribution."""
    error: str | None = None


def encode_status(status: SamplerStatus) -> str:
    """The value stored in the hash `samplers`."""
    return status.model_dump_json()


def decode_status(raw: bytes | str) -> SamplerStatus:
    """The inverse of `encode_status`. Raises MessageError for anything else."""
    try:
        return SamplerStatus.model_validate_json(raw)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        raise MessageError(f"sampler status: {first['loc']}: {first['msg']}") from exc
