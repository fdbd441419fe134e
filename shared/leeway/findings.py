"""What a check before a run found, and how a child process reports it to the launcher.

The preflight (`leeway_host.preflight`) tries the parts of a run that may hang or crash in processes of their
package: `python -m leeway_trainer.trial` and so on. A trial reads the configuration on standard input and
writes one JSON line per finding to what was standard output; libraries that print go to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from leeway.config import RunConfig
from leeway.config.load import build_config
from leeway.errors import LeewayError
from leeway.process import die_with_parent

Level = Literal["error", "warning", "info", "ok"]
LEVELS: tuple[Level, ...] = ("error", "warning", "info", "ok")
"""The worst first. Only `error` prevents a run."""


@dataclass(frozen=True)
class Finding:
    """One result of a check. `next_step` says what to do about it; empty: nothing."""

    level: Level
    check: str
    text: str
    next_step: str = ""


def order_findings(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first, otherwise in the order of the checks."""
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


Trial = Callable[[RunConfig, str], Iterable[Finding | str]]
"""(configuration, model directory) -> findings; a text announces what is tried next."""


def run_trial(name: str, trial: Trial) -> None:
    """The `main` of a trial. A LeewayError becomes a finding of check `name`; others end the process."""
    parser = argparse.ArgumentParser(description="Try a part of the run on standard input.")
    parser.add_argument("--model", default="", help="model directory")
    parser.add_argument("--parent", type=int, help="process that this one ends with")
    args = parser.parse_args()
    die_with_parent(args.parent)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        config = build_config(json.load(sys.stdin))
        try:
            for item in trial(config, args.model):
                line = {"doing": item} if isinstance(item, str) else asdict(item)
                print(json.dumps(line), file=answers, flush=True)
        except LeewayError as exc:
            print(json.dumps(asdict(Finding("error", name, str(exc)))), file=answers, flush=True)


def read_answers(text: str) -> tuple[list[Finding], str]:
    """The findings that a trial wrote, and what it announced last."""
    findings, doing = [], ""
    for line in text.splitlines():
        data = json.loads(line)
        if "doing" in data:
            doing = data["doing"]
        else:
            findings.append(Finding(**data))
    return findings, doing
