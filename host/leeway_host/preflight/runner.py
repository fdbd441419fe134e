"""All checks of a configuration: which there are, in which order they run, and what they may take.

first    what needs no model: settings, machine, ports, disk, Redis, one reward
prepare  the model is built or fetched, as the run does it; built at the same time as the first checks run,
         and fetched only when they found no error
second   what needs it: files, sizes, prompts, the trainer's model and its export
third    the engine, only with --engine: the run starts it anyway, and generates before step 0

The checks of a stage run at the same time. One that takes longer than its budget is a finding itself.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from leeway.config import RunConfig
from leeway.config.load import load_config
from leeway.errors import ConfigError, LeewayError, UsageError
from leeway.findings import Finding
from leeway_host.launch.claims import default_out
from leeway_host.launch.environment import (
    check_environment,
    mend_environment,
)
from leeway_host.preflight import disk, machine, model, permissions, ports, report, server, settings
from leeway_host.preflight.site import Site, read_model
from leeway_host.preflight.trials import TrialProcess

Progress = Callable[[str], None]
BUDGET_S = 10.0
SERVER_S = 60.0
TRIAL_S = 240.0
MARGIN_S = 10.0
"""What a check may take beyond the limit of the process that it waits for."""


@dataclass(frozen=True)
class Check:
    """A function from a site to findings, and how long it may take."""

    name: str
    function: Callable[[Site], list[Finding]]
    budget_s: float = BUDGET_S


class PreflightFailed(UsageError):
    """Errors were found; the message lists all of them."""


def first_checks(config: RunConfig) -> list[Check]:
    """Checks that need no model."""
    limit_s = TRIAL_S + 3 * config.task.reward_timeout_s
    return [
        Check(settings.CHECK, settings.check_settings),
        Check("machine", machine.check_machine_limits),
        Check(ports.CHECK, ports.check_ports),
        Check(disk.WRITE, disk.check_writing, 30.0),
        Check(permissions.CHECK, server.check_server, SERVER_S),
        _trial("reward", "leeway_host.preflight.reward", limit_s),
    ]


def second_checks() -> list[Check]:
    """Checks of the prepared model, and of sizes that follow from it."""
    return [
        Check(model.CHECK, model.check_files),
        Check("memory", machine.check_memory),
        Check(disk.SPACE, disk.check_space),
        Check("redis memory", server.check_server_memory, SERVER_S),
        _trial("prompts", "leeway_host.preflight.prompts", TRIAL_S),
        _trial("trainer", "leeway_trainer.trial", TRIAL_S),
    ]


def engine_check(config: RunConfig) -> Check:
    return _trial("engine", "leeway_sampler.trial", config.sampler.start_timeout_s + TRIAL_S)


def _trial(name: str, module: str, limit_s: float) -> Check:
    return Check(name, TrialProcess(name, module, limit_s).run, limit_s + MARGIN_S)


def run_checks(checks: Sequence[Check], site: Site) -> list[Finding]:
    """The findings of all checks in their order; a check that raises or hangs is a finding."""
    return start_checks(checks, site)()


def start_checks(checks: Sequence[Check], site: Site) -> Callable[[], list[Finding]]:
    """Start `checks`; the function that is returned waits for them, see `run_checks`."""
    results: dict[str, list[Finding]] = {}
    started = time.monotonic()
    threads = []
    for check in checks:
        # A daemon: a check that hangs in the kernel, on a dead network disk, must not hold the process.
        thread = threading.Thread(target=_run_check, args=(check, site, results), daemon=True)
        thread.start()
        threads.append(thread)

    def wait() -> list[Finding]:
        found = []
        for check, thread in zip(checks, threads, strict=True):
            thread.join(max(0.0, started + check.budget_s - time.monotonic()))
            hang = Finding(
                "error", check.name, f"no result within {check.budget_s:g} s", "see what it waits for"
            )
            found += results.get(check.name, [hang])
        return found

    return wait


def _run_check(check: Check, site: Site, results: dict[str, list[Finding]]) -> None:
    try:
        results[check.name] = check.function(site)
    except LeewayError as exc:
        results[check.name] = [Finding("error", check.name, str(exc))]
    except Exception as exc:  # noqa: BLE001 (a mistake in a check must not prevent a run)
        text = f"the check itself failed: {type(exc).__name__}: {exc}"
        results[check.name] = [Finding("warning", check.name, text, "please report it")]


def run_preflight(
    site: Site, prepare: Callable[[], Path], *, engine: bool = False, progress: Progress = lambda _: None
) -> tuple[list[Finding], Path | None]:
    """All findings about a run, and the directory of its model (None if it cannot be had)."""
    progress("preflight: configuration, machine, disk, Redis, reward")
    wait = start_checks(first_checks(site.config), site)
    if is_remote(site.config.model.name) and any(finding.level == "error" for finding in wait()):
        text = f"{site.config.model.name} was not downloaded because of the errors above"
        return [*wait(), Finding("info", model.CHECK, text)], None
    try:
        directory = prepare()  # meanwhile the checks run
        site = replace(site, model=read_model(directory))
    except (LeewayError, OSError) as exc:
        return distinct([*wait(), Finding("error", model.CHECK, str(exc))]), None
    found = wait()
    progress("preflight: model, prompts, trainer, export")
    found += run_checks(second_checks(), site)
    if engine:
        progress("preflight: engine")
        found += run_checks([engine_check(site.config)], site)
    return distinct(found), directory


def distinct(findings: Sequence[Finding]) -> list[Finding]:
    """The first finding of each text: a task that cannot be loaded fails several checks."""
    first: dict[str, Finding] = {}
    for finding in findings:
        first.setdefault(finding.text, finding)
    return list(first.values())


def is_remote(name: str) -> bool:
    """True for a model on the hub."""
    from leeway_host.models.prepare import BUILT_IN

    return name not in BUILT_IN and not Path(name).expanduser().is_dir()


def check_file(path: Path, sets: Sequence[str], *, engine: bool, progress: Progress) -> list[Finding]:
    """`leeway doctor CONFIG`: as `leeway run`, without a run."""
    from leeway_host.models import prepare_model

    try:
        config = load_config(path, sets)
    except ConfigError as exc:
        lines = [line.strip() for line in str(exc).splitlines()]
        problems = lines[1:] or lines
        return [*(Finding("error", settings.CHECK, line) for line in problems), *check_machine()]
    found = environment()
    site = Site(config, default_out(config), os.environ)
    others, _ = run_preflight(
        site,
        lambda: prepare_model(config.model, task=config.task, seed=config.seed, progress=progress),
        engine=engine,
        progress=progress,
    )
    return found + others


def environment() -> list[Finding]:
    """What `leeway run` checks and mends in the environment before anything else."""
    found = [
        Finding("error" if problem.fatal else "warning", "environment", f"{problem.subject}: {problem.text}")
        for problem in check_environment()
    ]
    mend_environment()
    text = "working directory, umask, TMPDIR, cache, open files and PYTHONPATH are usable"
    return found or [Finding("ok", "environment", text)]


def check_machine() -> list[Finding]:
    """`leeway doctor --machine`: the machine alone."""
    return [*environment(), *machine.judge_machine(machine.read_machine(), None)]


def require_ready(
    config: RunConfig, out: Path, prepare: Callable[[], Path], note: Progress, progress: Progress
) -> Path:
    """The directory of the model, when nothing speaks against the run; warnings go to `note`.

    Raises PreflightFailed with all errors.
    """
    found, directory = run_preflight(Site(config, out, os.environ), prepare, progress=progress)
    for finding in found:
        if finding.level == "warning":
            note(report.plain(finding))
    errors = [finding for finding in found if finding.level == "error"]
    if errors or directory is None:
        lines = "\n".join(f"  {report.plain(finding).removeprefix('error: ')}" for finding in errors)
        raise PreflightFailed(
            f"preflight: {report.count(errors)}\n{lines}\n"
            "nothing was started; --no-preflight skips these checks"
        )
    return directory
