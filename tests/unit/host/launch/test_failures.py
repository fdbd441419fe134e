"""How a run ends when a service does: exit code and message; and signals, which are never lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from leeway.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_POISONED, EXIT_STALLED, EXIT_USAGE, StalledError
from leeway_host.launch.failures import service_failure
from leeway_host.launch.interrupt import Interrupted, StopRequest
from leeway_host.launch.services import Service


def service(tmp_path: Path, name: str, log: str) -> Service:
    path = tmp_path / f"{name}.log"
    path.write_text(log)
    return Service(name, ["true"], path, {})


@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [
        (1, EXIT_FAILED, "sampler-0 ended (exit code 1)"),
        (-9, EXIT_FAILED, "sampler-0 ended (killed by SIGKILL)"),
        (EXIT_USAGE, EXIT_USAGE, "exit code 2"),
        (EXIT_POISONED, EXIT_POISONED, "exit code 4"),
        (EXIT_STALLED, EXIT_STALLED, "exit code 3"),
    ],
)
def test_a_failure_names_the_service_its_end_and_its_log(
    tmp_path: Path, code: int, exit_code: int, words: str
) -> None:
    failed = service(tmp_path, "sampler-0", "first\nthe cause\n")
    error = service_failure(failed, code, "\na hint", [])
    assert error.exit_code == exit_code
    assert isinstance(error, StalledError) == (code == EXIT_STALLED)
    text = str(error)
    assert words in text and "the cause" in text and text.endswith("a hint")
    assert str(failed.log_path) in text


def test_a_poisoned_ticket_shows_the_samplers_that_it_killed(tmp_path: Path) -> None:
    failed, killed, calm = (service(tmp_path, f"sampler-{i}", f"log of {i}") for i in range(3))
    killed.restarts = 1
    text = str(service_failure(failed, EXIT_POISONED, "", [failed, killed, calm]))
    assert "log of 1" in text and "which was restarted" in text and "log of 2" not in text
    assert "log of 1" not in str(service_failure(failed, 1, "", [failed, killed, calm]))


def test_a_signal_is_remembered_until_it_is_checked() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        stop.check()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted, match="stopped by SIGTERM") as caught:
            stop.check()
        assert caught.value.exit_code == EXIT_INTERRUPTED
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_immediate_signal_interrupts_at_once() -> None:
    with StopRequest() as stop:
        stop.immediate = True
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted):
            stop.check()
