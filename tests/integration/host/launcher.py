"""The command `leeway` with stand-ins for the services, without a model. `launcher.py run CONFIG ...`

There is nothing that a preflight could try: it is left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

from leeway_host.cli.app import main
from leeway_host.launch import local
from leeway_host.launch.commands import Command, LaunchPlan
from leeway_host.launch.local import LocalRun

STAND_IN = Path(__file__).parent / "stand_in.py"
original = LaunchPlan._command


def command(self: LaunchPlan, service: str, module_and_arguments: list[str]) -> Command:
    real = original(self, service, module_and_arguments)
    return Command([sys.executable, str(STAND_IN), service, *module_and_arguments[1:]], real.env)


def prepare_model(self: LocalRun) -> Path:
    return self.out


def require_ready(config: object, out: Path, *_: object) -> Path:
    return out


LaunchPlan._command = command  # type: ignore[method-assign]
LocalRun.prepare_model = prepare_model  # type: ignore[method-assign]
local.require_ready = require_ready  # type: ignore[attr-defined, assignment]

if __name__ == "__main__":
    main()
