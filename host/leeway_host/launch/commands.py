"""What each service of a run is started with: pure functions from the configuration to a command line."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from leeway.config import RunConfig

REDIS_ENV = "LEEWAY_REDIS_URL"
"""Services read the server's URL from the environment, so that no password appears in a process list."""
SERVICES_CONFIG = ".services.yaml"
"""The configuration file that services read; it becomes DIR/config.yaml once the trainer has started."""
SERVICE_ENV = {
    # Neither services nor what they start (torchrun's ranks, vLLM's workers, reward workers) import from the
    # working directory, where a user may have a types.py or a folder vllm/. The module of task.reward is
    # looked up there explicitly, after everything that is installed.
    "PYTHONSAFEPATH": "1",
    # Text is UTF-8 whatever the locale says.
    "PYTHONUTF8": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # A segmentation fault leaves "Fatal Python error" and its place in the log.
    "PYTHONFAULTHANDLER": "1",
}
QUIET_ENV = {"TORCH_CPP_LOG_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error"}
"""Libraries that would fill the logs, unless telemetry.log_level is DEBUG or the user has set them."""
CONTROLLER, TRAINER, FIRST_SAMPLER = 0, 1, 2
"""Offsets of the services' ports from telemetry.metrics_port."""


@dataclass(frozen=True)
class Command:
    """Arguments and additional environment variables of a process."""

    argv: list[str]
    env: dict[str, str]


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that the command lines of one run depend on. `model` is a prepared directory."""

    config: RunConfig
    out: Path
    run_id: str
    redis_url: str
    model: Path

    def controller(self) -> Command:
        return self._command("controller", ["leeway_controller", *self._common(CONTROLLER)])

    def trainer(self) -> Command:
        module, ranks = ["leeway_trainer"], self.config.trainer.ranks
        if ranks > 1:
            torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
            # Without `--`, torchrun takes our --run for its own --run-path.
            module = [*torchrun, "--", "leeway_trainer"]
        return self._command("trainer", [*module, *self._common(TRAINER), "--out", str(self.out)])

    def sampler(self, index: int) -> Command:
        """Sampler number `index`, from 0; its id is `sampler-<index>`."""
        first = self.config.sampler.http_port
        own = ["--id", f"sampler-{index}", "--port", str(first + index if first else 0)]
        return self._command("sampler", ["leeway_sampler", *self._common(FIRST_SAMPLER + index), *own])

    def _common(self, port_offset: int) -> list[str]:
        first = self.config.telemetry.metrics_port
        return [
            *("--config", str(self.out / SERVICES_CONFIG)),
            *("--run", self.run_id),
            *("--redis", f"env:{REDIS_ENV}"),
            *("--model", str(self.model)),
            # All services of this machine share one configuration, so each is given its own port.
            *("--metrics-port", str(first + port_offset if first else 0)),
        ]

    def _command(self, service: str, module_and_arguments: list[str]) -> Command:
        urls: dict[str, str] = {str(name): url for name, url in self.config.redis.service_urls.items()}
        quiet = {} if self.config.telemetry.log_level == "DEBUG" else QUIET_ENV
        unset = {name: value for name, value in quiet.items() if name not in os.environ}
        env = {**unset, **SERVICE_ENV, REDIS_ENV: urls.get(service, self.redis_url)}
        return Command([sys.executable, "-m", *module_and_arguments], env)
