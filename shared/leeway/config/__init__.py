"""The configuration of a run, one module per section.

A run is described by one YAML file. Values are taken from the defaults, the file, the environment
(`LEEWAY_SYNC__MAX_AGE=4`: section, two underscores, key) and `--set sync.max_age=4`; later sources override
earlier ones (`leeway.config.load`). Names follow verl, TRL and vLLM where those have one.
"""

from leeway.config.base import Section
from leeway.config.batch import BatchConfig
from leeway.config.checks import ChecksConfig
from leeway.config.correction import AnyCorrection, CorrectionConfig, build_correction
from leeway.config.model import ModelConfig
from leeway.config.output import OutputConfig
from leeway.config.redis import RedisConfig
from leeway.config.run import RunConfig
from leeway.config.sampler import SamplerConfig
from leeway.config.sampling import SamplingConfig
from leeway.config.sync import SyncConfig
from leeway.config.task import TaskConfig
from leeway.config.telemetry import TelemetryConfig
from leeway.config.trainer import TrainerConfig
from leeway.config.weights import WeightsConfig

__all__ = [
    "AnyCorrection",
    "BatchConfig",
    "ChecksConfig",
    "CorrectionConfig",
    "ModelConfig",
    "OutputConfig",
    "RedisConfig",
    "RunConfig",
    "SamplerConfig",
    "SamplingConfig",
    "Section",
    "SyncConfig",
    "TaskConfig",
    "TelemetryConfig",
    "TrainerConfig",
    "WeightsConfig",
    "build_correction",
]
