"""What each service of a run is started with: pure functions from the configuration to a command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from leeway.config import RunConfig

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


UrlOf = Callable[[str, str], str]
"""(service, name of the process) -> URL of the server with the process's user."""


@dataclass(frozen=True)
class Command:
    """Arguments and additional environment variables of a process, and what it reads from standard input."""

    argv: list[str]
    env: dict[str, str]
    secret: str


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that the command lines of one run depend on. `model` is a prepared directory."""

    config: RunConfig
    out: Path
    run_id: str
    url_of: UrlOf
    model: Path

    def controller(self) -> Command:
        return self._command("controller", "controller", ["leeway_controller", *self._common(CONTROLLER)])

    def trainer(self) -> Command:
        module, ranks = ["leeway_trainer"], self.config.trainer.ranks
        if ranks > 1:
            torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
            # Without `--`, torchrun takes our --run for its own --run-path.
            module = [*torchrun, "--", "leeway_trainer"]
        return self._command("trainer", "trainer", [*module, *self._common(TRAINER), "--out", str(self.out)])

    def sampler(self, index: int) -> Command:
        """Sampler number `index`, from 0; its id is `sampler-<index>`."""
        first = self.config.sampler.http_port
        name = f"sampler-{index}"
        own = ["--id", name, "--port", str(first + index if first else 0)]
        return self._command("sampler", name, ["leeway_sampler", *self._common(FIRST_SAMPLER + index), *own])

    def _common(self, port_offset: int) -> list[str]:
        first = self.config.telemetry.metrics_port
        return [
            *("--config", str(self.out / SERVICES_CONFIG)),
            *("--run", self.run_id),
            *("--redis", "-"),
            *("--model", str(self.model)),
            # All services of this machine share one configuration, so each is given its own port.
            *("--metrics-port", str(first + port_offset if first else 0)),
        ]

    def _command(self, service: str, name: str, module_and_arguments: list[str]) -> Command:
        quiet = {} if self.config.telemetry.log_level == "DEBUG" else QUIET_ENV
        unset = {name: value for name, value in quiet.items() if name not in os.environ}
        argv = [sys.executable, "-m", *module_and_arguments]
        return Command(argv, {**unset, **SERVICE_ENV}, self.url_of(service, name))
