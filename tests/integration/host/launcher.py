"""The command `leeway` with stand-ins for the services and without a model. `launcher.py run CONFIG ...`."""

from __future__ import annotations

import sys
from pathlib import Path

from leeway_host.cli.app import main
from leeway_host.launch import local
from leeway_host.launch.commands import Command, LaunchPlan
from leeway_host.launch.local import LocalRun

STAND_IN = Path(__file__).parent / "stand_in.py"
original = LaunchPlan._command


def command(self: LaunchPlan, service: str, name: str, module_and_arguments: list[str]) -> Command:
    real = original(self, service, name, module_and_arguments)
    return Command([sys.executable, str(STAND_IN), service, *module_and_arguments[1:]], real.env, real.secret)


def prepare_model(self: LocalRun) -> Path:
    return self.out


LaunchPlan._command = command  # type: ignore[method-assign]
LocalRun.prepare_model = prepare_model  # type: ignore[method-assign]
local.require_ready = lambda *_: None  # there is no model to try  # type: ignore[assignment]

if __name__ == "__main__":
    main()
