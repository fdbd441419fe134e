"""How a run fails: which exit code, and a message with the log of the process that ended it."""

from __future__ import annotations

from collections.abc import Iterable

from leeway.errors import (
    EXIT_FAILED,
    EXIT_POISONED,
    EXIT_STALLED,
    EXIT_USAGE,
    LeewayError,
    StalledError,
)
from leeway_host.launch.services import Service, describe_exit

FINAL = (EXIT_USAGE, EXIT_STALLED, EXIT_POISONED)
"""Exit codes after which restarting a service changes nothing."""


class RunFailed(LeewayError):
    """A process of the run failed; the message contains its name and the end of its log."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def service_failure(service: Service, code: int, hint: str, others: Iterable[Service]) -> LeewayError:
    """The error that ends a run because `service` exited with `code`.

    `others`: the other samplers. When a ticket has killed several samplers, the logs of those that were
    restarted show how.
    """
    message = (
        f"{service.name} ended ({describe_exit(code)}); the end of {service.log_path}:\n"
        f"{service.log_tail()}{hint}"
    )
    if code == EXIT_STALLED:
        return StalledError(message)
    if code == EXIT_POISONED:
        for other in others:
            if other.restarts and other is not service:
                message += f"\nthe end of {other.log_path}, which was restarted:\n{other.log_tail()}"
    return RunFailed(message, code if code in (EXIT_USAGE, EXIT_POISONED) else EXIT_FAILED)
