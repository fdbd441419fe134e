"""One run: all sections, and what must hold between them."""

from __future__ import annotations

from pydantic import Field, model_validator

from leeway.config.base import Section
from leeway.config.batch import BatchConfig
from leeway.config.checks import ChecksConfig
from leeway.config.correction import AnyCorrection, build_correction
from leeway.config.model import ModelConfig
from leeway.config.output import OutputConfig
from leeway.config.redis import RedisConfig
from leeway.config.sampler import SamplerConfig
from leeway.config.sampling import SamplingConfig
from leeway.config.sync import SyncConfig
from leeway.config.task import AnyTask
from leeway.config.telemetry import TelemetryConfig
from leeway.config.trainer import TrainerConfig
from leeway.config.weights import WeightsConfig


class RunConfig(Section):
    """A run."""

    name: str = Field(default="run", pattern=r"^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$")
    """Lower-case letters, digits and dashes; part of every Redis key."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of everything that is drawn."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    task: AnyTask
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    batch: BatchConfig = Field(default_factory=BatchConfig)
    correction: AnyCorrection = Field(default_factory=build_correction)
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
