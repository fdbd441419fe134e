"""RunConfig: everything a run can be told, in one strict model.

A run is described by one YAML file. Values come, later ones winning, from the defaults below, the file,
the environment (`LEEWAY_SYNC__MAX_AGE=4`: section, two underscores, key) and `--set sync.max_age=4`.
Names follow verl, TRL and vLLM where those have one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, field_validator, model_validator

Dtype = Literal["bfloat16", "float32"]
Service = Literal["controller", "trainer", "sampler"]


class Section(BaseModel):
    """Base of all sections: unknown keys and wrong types are refused, values cannot change later."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


Beta = Annotated[float, Field(ge=0, lt=1)]


class ModelConfig(Section):
    """The policy."""

    name: str = Field(default="smollm2-135m-instruct", min_length=1)
    """`smollm2-135m-instruct`, `tiny`, a directory in Hugging Face format, or a hub id."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Only for `tiny`: sizes of the model and of its supervised warm-up."""
    max_length: int = Field(default=512, ge=8)
    """Longest prompt plus response, in tokens."""
    trust_remote_code: bool = False
    """Allow code that ships inside a model directory."""


class TaskConfig(Section):
    """Where prompts come from and how a response is rewarded."""

    kind: Literal["reasoning_gym", "jsonl", "digits"] = "reasoning_gym"
    """`reasoning_gym`: a procedural data set by name; `jsonl`: a file; `digits`: sort digits, built in."""
    name: str | None = None
    """The data set of reasoning-gym, for example `chain_sum`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the data set."""
    path: str | None = None
    """The JSONL file, one object a line."""
    prompt_field: str = "prompt"
    """Field of a JSONL object that holds the prompt (text, or a list of chat messages)."""
    answer_field: str = "answer"
    """Field of a JSONL object that holds the answer."""
    size: int = Field(default=1024, ge=1)
    """Number of items of a procedural data set."""
    seed: int = Field(default=0, ge=0)
    """Seed of a procedural data set."""
    reward: str = "exact"
    """`exact`, `last_number`, `verifier` (the task's own) or `module:function`."""
    reward_timeout_s: float = Field(default=5.0, gt=0)
    """Time limit of one scoring, after which its process is killed."""
    reward_memory_mib: int | None = Field(default=1024, ge=16)
    """Memory that a scoring process may take beyond what it has when the task is loaded; null: no limit."""
    reward_workers: int = Field(default=1, ge=1)
    """Scoring processes beside each sampler."""
    error_reward: float = 0.0
    """Reward of a response whose scoring crashed or ran out of time."""
    system_prompt: str | None = None
    """First message of the chat template."""
    prompt_suffix: str = ""
    """Text put after every prompt."""

    @model_validator(mode="after")
    def _needs(self) -> TaskConfig:
        if self.kind == "reasoning_gym" and not self.name:
            raise ValueError("task.name is required for kind reasoning_gym, for example chain_sum")
        if self.kind == "jsonl" and not self.path:
            raise ValueError("task.path is required for kind jsonl")
        return self


class SamplingConfig(Section):
    """How samplers draw tokens, and what they report about it."""

    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0 switches it off."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    max_new_tokens: int = Field(default=24, ge=1)
    head_tokens: int = Field(default=64, ge=0)
    """Most tokens of the sampler's distribution that are reported per position."""
    head_eps: float = Field(default=1e-3, ge=0, lt=1)
    """The head is the smallest set of top tokens with at least 1 - head_eps of the mass."""

    @property
    def truncated(self) -> bool:
        """True when some tokens of the vocabulary cannot be drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @model_validator(mode="after")
    def _support_is_reported(self) -> SamplingConfig:
        if self.truncated and not 0 < self.top_k <= self.head_tokens:
            raise ValueError(
                f"top_p={self.top_p}, top_k={self.top_k}, min_p={self.min_p} cut the distribution, and the "
                f"trainer can correct for that only when the sampler reports the whole support: set top_k "
                f"between 1 and head_tokens={self.head_tokens}, or leave all three off (1.0, 0, 0.0)"
            )
        return self


class BatchConfig(Section):
    """What makes one optimiser step."""

    prompts: int = Field(default=16, ge=1)
    """Prompts in a batch."""
    group_size: int = Field(default=4, ge=1)
    """Responses per prompt."""
    order_seed: int | None = Field(default=None, ge=0, lt=2**31)
    """Seed of the order of the prompts; null: the run's `seed`. With one of their own, runs that differ in
    `seed` draw other responses to the same prompts."""

    @property
    def size(self) -> int:
        """Responses in a batch."""
        return self.prompts * self.group_size


class CorrectionConfig(Section):
    """How the trainer corrects for the mismatch between sampler and trainer."""

    method: str = "dlc"
    """`leeway corrections` lists what there is."""
    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    std_floor: float = Field(default=1e-4, gt=0)
    """Least standard deviation of a group's rewards by which grpo divides; a smaller one gives 0."""
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"] | None = None
    """How token losses become one number, by what was requested; null: the method's own way."""
    centering: Literal["discrepancy", "weighted", "plain", "none"] = "discrepancy"
    """What `dlc` subtracts at each prefix."""
    lag_clip: Literal["ppo", "clamp", "none"] = "ppo"
    """Form of the clip of the lag ratio in `dlc`."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """Lower half of PPO's clip range, also of `dlc` and `decoupled_ppo`."""
    clip_high: float = Field(default=0.2, ge=0)
    dual_clip: float = Field(default=3.0, gt=1)
    """Largest ratio of a token with a negative advantage."""
    clamp_low: float = Field(default=0.0, ge=0)
    clamp_high: float = Field(default=2.0, gt=0)
    head_tail: Literal["current", "sync"] = "current"
    """How centring models the sampler's distribution off the reported head: in proportion to the current
    policy (no extra work), or to the trainer on the sampler's weights (closer under lag; one more product
    with the output layer per token)."""
    score_centering: bool = False
    """Subtract the mean of the weighted score under mu: for `none`, `ppo`, `is`, `tis` and `mis` by token."""
    reference: Literal["mu", "prox", "sync"] = "mu"
    """What `ppo` and `gspo` take the ratio to: the sampler's distribution, the policy at the start of the
    update (with one optimiser step a batch: the current one), or the trainer on the sampler's
    weights."""
    is_level: Literal["token", "sequence"] = "token"
    """Level of the importance weights of `is`, `tis` and `mis`."""
    tis_clip: float = Field(default=2.0, gt=0)
    """Largest weight of `tis`."""
    tis_clip_low: float = Field(default=0.0, ge=0)
    mis_low: float = Field(default=0.5, ge=0)
    mis_high: float = Field(default=5.0, gt=0)
    mis_inside: Literal["ratio", "one"] = "ratio"
    """Weight of `mis` and `icepop` inside [mis_low, mis_high]."""
    mis_outside: Literal["drop", "clamp"] = "drop"
    """What they do outside it."""
    gspo_clip_low: float = Field(default=3e-4, gt=0)
    gspo_clip_high: float = Field(default=4e-4, gt=0)
    prox_logp_method: Literal["recompute", "loglinear"] = "recompute"
    """How `decoupled_ppo` gets its proximal policy; loglinear is A-3PO."""
    behave_weight_cap: float | None = Field(default=5.0, gt=0)
    """`decoupled_ppo` drops tokens whose weight prox/mu is larger; null: none."""
    m2_variant: Literal["paper", "areal", "repo"] = "paper"
    m2_threshold: float = Field(default=0.04, gt=0)
    """Largest second moment of the log-ratio that `m2po` lets through."""
    vcpo_clip: float = Field(default=8.0, gt=0)
    """Largest sequence weight of `vcpo`."""
    vcpo_scaling: Literal["sqrt", "linear"] = "sqrt"
    """How `vcpo` scales the learning rate by the effective sample size."""
    vcpo_base_ess: float = Field(default=1.0, gt=0, le=1)
    """Effective sample size (share of n) from which on the learning rate is not scaled."""
    vcpo_baseline: Literal["none", "opob"] = "none"
    """Only none: the optimal baseline needs a gradient norm per response, which batched training has not."""

    @model_validator(mode="after")
    def _ranges(self) -> CorrectionConfig:
        pairs = (("clamp_low", "clamp_high"), ("tis_clip_low", "tis_clip"), ("mis_low", "mis_high"))
        for low, high in pairs:
            if getattr(self, low) >= getattr(self, high):
                raise ValueError(f"{low}={getattr(self, low)} must be below {high}={getattr(self, high)}")
        if self.vcpo_baseline != "none":
            raise ValueError(
                "vcpo_baseline=opob needs the norm of every response's own gradient; a batched backward pass "
                "gives only their sum, and cheap substitutes are another method: set vcpo_baseline=none"
            )
        if self.score_centering:
            self._can_be_centred()
        return self

    def _can_be_centred(self) -> None:
        if self.method in ("dlc", "score_centering"):
            raise ValueError(f"score_centering is part of method {self.method} already: leave it false")
        if self.method not in ("none", "is", "tis", "mis", "icepop", "ppo"):
            raise ValueError(f"score_centering does not compose with method {self.method}")
        if self.method in ("is", "tis", "mis", "icepop") and self.is_level == "sequence":
            raise ValueError("score_centering composes with weights of tokens only: set is_level=token")
        if self.method == "ppo" and self.reference == "prox":
            raise ValueError("score_centering composes with reference mu or sync")

    @property
    def needs_head(self) -> bool:
        """True when the method looks at more of mu than the drawn token."""
        centred_dlc = self.method == "dlc" and self.centering != "none"
        return centred_dlc or self.method == "score_centering" or self.score_centering


class SyncConfig(Section):
    """When samplers get new weights, and how far they may run ahead."""

    ess_threshold: float | None = Field(default=0.5, gt=0, le=1)
    """Resync when the effective sample size of the lag ratio (share of n) falls below; null: never."""
    ess_level: Literal["token", "sequence"] = "token"
    clip_fraction: float | None = Field(default=0.03, gt=0, lt=1)
    """Resync when the clip of the lag ratio stops more than this share of tokens: the run stands still where
    ESS sees nothing (docs/reproduction.md); null: never."""
    max_age: int | None = Field(default=16, ge=1)
    """Resync when the sampler's weights are this many optimiser steps behind; 1: every step."""
    every_n: int | None = Field(default=None, ge=1)
    """Resync after every n-th step, whatever is measured."""
    max_lead: int = Field(default=1, ge=0)
    """Batches that may be generated ahead of the trainer; 0: synchronous."""
    verdict_timeout_s: float = Field(default=10.0, gt=0)
    """After this the trainer applies the same policy itself."""
    commit_timeout_s: float = Field(default=120.0, gt=0)
    """Samplers that do not attest a new version within this time are fenced: others take their tickets, and
    they must load the weights afresh."""
    heartbeat_s: float = Field(default=1.0, gt=0)
    ticket_idle_s: float = Field(default=10.0, gt=0)
    """A ticket without a heartbeat for this long is claimed by another sampler."""
    stall_timeout_s: float = Field(default=300.0, gt=0)
    """No progress for this long ends the run with a diagnosis; a service that starts again meanwhile gets
    `sampler.start_timeout_s` more."""

    @model_validator(mode="after")
    def _heartbeat(self) -> SyncConfig:
        if self.ticket_idle_s < 3 * self.heartbeat_s:
            raise ValueError(
                f"ticket_idle_s={self.ticket_idle_s} must be at least three heartbeats "
                f"(heartbeat_s={self.heartbeat_s}), or live samplers lose their tickets"
            )
        return self


class SamplerConfig(Section):
    """The sampler processes and their vLLM engine."""

    replicas: int = Field(default=1, ge=1)
    dtype: Dtype = "bfloat16"
    max_num_seqs: int = Field(default=64, ge=1)
    """Responses in flight in one engine."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    cpu_kv_cache_gib: int = Field(default=1, ge=1)
    cpu_threads: int | None = Field(default=None, ge=1)
    """Threads of a CPU engine; null: the cores divided among the processes of the run."""
    enforce_eager: bool | None = None
    """null: true on CPU, false on GPU."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """More arguments for vLLM's AsyncEngineArgs, for example quantization."""
    http_host: str = "127.0.0.1"
    http_port: int = Field(default=0, ge=0, le=65535)
    """Port of /healthz and /readyz of the first sampler, the next ones count up; 0: none."""
    drain_s: float = Field(default=20.0, gt=0)
    """On SIGTERM, time to finish what is in flight before it is handed back."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    max_restarts: int = Field(default=3, ge=0)
    """Restarts of a sampler by the local launcher before the run fails."""
    max_deliveries: int = Field(default=3, ge=2)
    """A ticket that is handed out for this many times is drawn alone; when its sampler dies of it once more,
    the run ends and names it."""


class TrainerConfig(Section):
    """The DeepSpeed trainer."""

    steps: int = Field(default=20, ge=1)
    """Optimiser steps of the whole run."""
    ranks: int = Field(default=1, ge=1)
    """Trainer processes on this machine."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Dtype = "bfloat16"
    """Compute type; master weights and optimiser are float32."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    learning_rate: float = Field(default=1e-5, gt=0)
    lr_schedule: Literal["constant", "linear"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), strict=False)
    max_grad_norm: float = Field(default=1.0, gt=0)
    micro_batch_tokens: int = Field(default=4096, ge=16)
    """Padded tokens in one forward and backward pass."""
    logits_chunk_tokens: int = Field(default=128, ge=1)
    """Positions whose logits exist at the same time."""
    gradient_checkpointing: bool = False
    cpu_threads: int | None = Field(default=None, ge=1)
    """Threads of a CPU trainer; null: one per core."""
    checkpoint_every: int = Field(default=10, ge=0)
    """Steps between checkpoints; 0: only the last step's."""
    keep_checkpoints: int = Field(default=2, ge=1)
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """More DeepSpeed configuration, merged over Leeway's own."""
    max_restarts: int = Field(default=0, ge=0)
    """Restarts from the last checkpoint by the local launcher, after a crash, before the run fails."""


class WeightsConfig(Section):
    """The broadcast of new weights."""

    chunk_bytes: int = Field(default=1 << 20, ge=1 << 16, le=4 << 20)
    dtype: Dtype = "bfloat16"
    """Type on the wire, which is what samplers load."""
    transport: Literal["redis", "nccl"] = "redis"
    """`nccl`: straight from the trainer's GPU to the samplers' GPUs through vLLM's own engine, with manifests
    in Redis. Needs NVIDIA GPUs on one fabric and vLLM beside the trainer; not verified yet."""
    nccl_address: str | None = None
    """Where samplers reach the trainer's first rank; null: its host name."""
    nccl_port: int = Field(default=29600, ge=1, le=65535)
    keyframe_every: int = Field(default=32, ge=1)
    """Every n-th version is sent in full, for samplers that join later; between them only what changed. 1:
    every version in full."""
    max_redis_mib: int | None = Field(default=None, ge=1)
    """Most memory that weights may take in Redis; null: what the server's maxmemory leaves, less a tenth. A
    version that does not fit is not published, and the run goes on with the old one. A keyframe needs room
    for two whole versions and the deltas between them."""


def _is_redis_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        place = parts.hostname and parts.port != 0
    except ValueError:
        return False
    database = parts.path.strip("/")
    plain = not parts.query and not parts.fragment and (not database or database.isdecimal())
    return bool(place) and plain and parts.scheme in ("redis", "rediss")


class RedisConfig(Section):
    """The Redis or Valkey server that carries everything in flight."""

    url: str | None = None
    """`redis://[[user]:password@]host:port/db` or `rediss://`; null: a server of the run's own."""
    service_urls: dict[Service, str] = Field(default_factory=dict)
    """URLs of services (`controller`, `trainer`, `sampler`) that have users of their own, see
    `leeway redis acl`; the others and the launcher use `url`."""
    read_urls: list[str] = Field(default_factory=list)
    """Replicas that samplers read weights from, `redis://host:port`, each sampler beginning with another
    one; user and password are those of `url`. What they do not have comes from `url`."""
    maxmemory_mib: int = Field(default=4096, ge=64)
    """Memory limit of the run's own server; it refuses writes beyond, it never evicts."""
    appendonly: bool = False
    """Let the run's own server write an append-only file, so that nothing is lost when it dies; without it
    what is in flight is generated again."""
    socket_timeout_s: float = Field(default=5.0, ge=1)
    reconnect_s: float = Field(default=60.0, gt=0)
    """How long a lost server is retried before a process gives up."""

    @field_validator("url", "service_urls")
    @classmethod
    def _plain_url(cls, value: Any) -> Any:
        for url in value.values() if isinstance(value, dict) else [value] if value else []:
            if not _is_redis_url(url):
                raise ValueError(
                    "expected redis://[user]:password@host:port/0 or rediss://..., without a query; / # ? @ "
                    "in the password are written %2F %23 %3F %40"
                )
        return value

    @model_validator(mode="after")
    def _users_need_a_server(self) -> RedisConfig:
        if self.service_urls and self.url is None:
            raise ValueError("redis.service_urls needs redis.url: a server of the run's own has no users")
        return self

    @field_validator("read_urls")
    @classmethod
    def _places(cls, urls: list[str]) -> list[str]:
        for url in urls:
            if not _is_redis_url(url) or "@" in url or urlsplit(url).path.strip("/"):
                raise ValueError(
                    "expected redis://host:port or rediss://host:port; user, password and database are those "
                    "of redis.url"
                )
        return urls


class TelemetryConfig(Section):
    """Logs, traces and metrics."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    log_format: Literal["text", "json"] = "text"
    """json: one object a line, with trace and span ids."""
    otlp_endpoint: str | None = None
    """Where spans go, for example http://localhost:4317 (gRPC) or http://localhost:4318 (HTTP). The variables
    of OpenTelemetry (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_SAMPLER, ...) come first; without either there
    are none."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of /metrics (Prometheus) of every service; on one machine the controller has this one, the trainer
    the next and the samplers those after; null: none."""


class ChecksConfig(Section):
    """The infrastructure checks (docs/checks.md)."""

    enabled: bool = True
    """Let the controller check every batch as it goes."""
    sample_fraction: float = Field(default=0.1, ge=0, le=1)
    """Share of responses whose distributions and tokens are looked into."""
    probe_draws: int = Field(default=512, ge=0)
    """One-token draws from a fixed prompt after a resync, at most once a minute; 0: none."""
    self_prefix_responses: int = Field(default=64, ge=0)
    """Responses of a batch that are scored with the old and the new weights around a resync; 0: none."""
    self_prefix_every: int = Field(default=8, ge=1)
    """Steps between two such measurements, at least."""


class OutputConfig(Section):
    """What a run leaves behind."""

    dir: str | None = None
    """Output directory; null: runs/<name>-<time>."""
    save_model: bool = True
    """Write the final policy in Hugging Face format to DIR/model."""
    save_batches: list[NonNegativeInt] = Field(default_factory=list)
    """Steps whose batch is kept in DIR/batches with the weights on both sides (twice the size of the model
    each), for `leeway corrections compare`."""


class RunConfig(Section):
    """One run."""

    name: str = Field(default="run", pattern=r"^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$")
    """Lower-case letters, digits and dashes; part of every Redis key."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    model: ModelConfig = Field(default_factory=ModelConfig)
    task: TaskConfig
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    batch: BatchConfig = Field(default_factory=BatchConfig)
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    sync: SyncConfig = Field(default_factory=SyncConfig)
    sampler: SamplerConfig = Field(default_factory=SamplerConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    redis: RedisConfig = Field(default_factory=RedisConfig)
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)
    checks: ChecksConfig = Field(default_factory=ChecksConfig)
    output: OutputConfig = Field(default_factory=OutputConfig)

    @property
    def order_seed(self) -> int:
        """Seed of the order of the prompts."""
        return self.seed if self.batch.order_seed is None else self.batch.order_seed

    @model_validator(mode="after")
    def _fits_together(self) -> RunConfig:
        if self.sampling.max_new_tokens >= self.model.max_length:
            raise ValueError(
                f"sampling.max_new_tokens={self.sampling.max_new_tokens} must be below "
                f"model.max_length={self.model.max_length}, which also holds the prompt"
            )
        if self.batch.group_size < 2:
            raise ValueError(
                f"correction.advantage={self.correction.advantage} compares the responses to one prompt: "
                "set batch.group_size >= 2"
            )
        if self.correction.needs_head and self.sampling.head_tokens == 0:
            raise ValueError(
                f"correction.method={self.correction.method} needs the head of the sampler's distribution "
                "for its centring: set sampling.head_tokens >= 1, or choose a method without centring"
            )
        if self.batch.size < self.trainer.ranks:
            raise ValueError(
                f"batch.prompts x batch.group_size = {self.batch.size} responses cannot be divided among "
                f"trainer.ranks={self.trainer.ranks}"
            )
        return self
