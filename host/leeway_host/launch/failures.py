"""How a run fails: exit code, message, and the one reason: which process, what error, what to do next."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from leeway.errors import (
    EXIT_FAILED,
    EXIT_POISONED,
    EXIT_STALLED,
    EXIT_USAGE,
    LeewayError,
)
from leeway_host.launch.reasons import (
    Reason,
    context,
    describe_exit,
    explain_exit,
    find_cause,
    last_line,
    next_step,
)
from leeway_host.launch.services import Service

FINAL = (EXIT_USAGE, EXIT_STALLED, EXIT_POISONED)
"""Exit codes after which restarting a service changes nothing."""
LAUNCHER, SERVER = "launcher", "redis"
RESUME_FROM = re.compile(r"leeway run --resume .+ --resume-from \d+")
"""What a message about a damaged checkpoint ends with."""


class RunFailed(LeewayError):
    """A process of the run failed. `process`: its name; `cause`: the error that ended it."""

    def __init__(
        self, message: str, exit_code: int = EXIT_FAILED, *, process: str = LAUNCHER, cause: str = ""
    ) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.process, self.cause = process, cause or message


def service_failure(
    service: Service, code: int, others: Iterable[Service], *, details: bool = False
) -> RunFailed:
    """The error that ends a run because `service` exited with `code`.

    `others`: the other samplers. When a ticket has killed several samplers, the logs of those that were
    restarted show how. `details`: with the end of the log as it is, tracebacks included.
    """
    log = service.read_log()
    cause = explain_exit(code, log)
    tail = service.log_tail(60).splitlines() if details else context(log)
    message = f"{service.name} ended ({describe_exit(code)}): {cause}"
    if tail and tail != [cause]:
        shown = "\n".join(f"  {line}" for line in tail)
        message += f"\nthe end of {service.log_path}:\n{shown}"
    else:
        message += f"\nits log is {service.log_path}"
    if code == EXIT_POISONED:
        for other in others:
            if other.restarts and other is not service:
                whole = other.read_log(all_starts=True)
                died = find_cause(whole) or last_line(whole) or "no message"
                message += f"\n{other.name}, which was restarted: {died} ({other.log_path})"
    known = code if code in FINAL else EXIT_FAILED
    return RunFailed(message, known, process=service.name, cause=cause)


def find_reason(error: BaseException, out: Path, *, resumable: bool) -> Reason:
    """The reason of a run in `out` that ended with `error`.

    `resumable`: its last checkpoint can be continued from.
    """
    process = error.process if isinstance(error, RunFailed) else LAUNCHER
    cause = error.cause if isinstance(error, RunFailed) else describe_error(error)
    if isinstance(error, LeewayError) and error.exit_code == EXIT_USAGE:
        way_out = RESUME_FROM.search(cause)
        return Reason(process, cause, way_out[0] if way_out else "correct this, and start the run again")
    again = f"leeway run --resume {out}" if resumable else f"start the run again (logs: {out / 'logs'})"
    return Reason(process, cause, next_step(cause, again))


def describe_error(error: BaseException) -> str:
    """A LeewayError's message; any other error with its type."""
    return str(error) if isinstance(error, LeewayError) else f"{type(error).__name__}: {error}"
