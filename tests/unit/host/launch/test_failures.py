"""How a run ends when a service does: exit code and message; and signals, which are never lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from leeway.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_POISONED, EXIT_STALLED, EXIT_USAGE, UsageError
from leeway.process import stop_signals
from leeway_host.launch.failures import RunFailed, find_reason, service_failure
from leeway_host.launch.interrupt import Interrupted, StopRequest
from leeway_host.launch.services import Service

pytestmark = pytest.mark.usefixtures("own_signals")


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
    error = service_failure(failed, code, [])
    assert error.exit_code == exit_code
    text = str(error)
    assert words in text and "the cause" in text
    assert error.process == "sampler-0"
    assert str(failed.log_path) in text


def test_a_poisoned_ticket_shows_the_samplers_that_it_killed(tmp_path: Path) -> None:
    failed, killed, calm = (service(tmp_path, f"sampler-{i}", f"log of {i}") for i in range(3))
    killed.restarts = 1
    text = str(service_failure(failed, EXIT_POISONED, [failed, killed, calm]))
    assert "log of 1" in text and "which was restarted" in text and "log of 2" not in text
    assert "log of 1" not in str(service_failure(failed, 1, [failed, killed, calm]))


def test_a_traceback_is_shown_only_with_debug(tmp_path: Path) -> None:
    log = '21:10:03 INFO x\nTraceback (most recent call last):\n  File "x.py", line 1\nValueError: planted\n'
    failed = service(tmp_path, "trainer", log)
    assert "Traceback" not in str(service_failure(failed, 1, []))
    assert "ended (exit code 1): ValueError: planted" in str(service_failure(failed, 1, []))
    assert "Traceback" in str(service_failure(failed, 1, [], details=True))


@pytest.mark.parametrize(
    ("error", "resumable", "reason"),
    [
        (UsageError("bad value"), True, ("launcher", "bad value", "correct this, and start the run again")),
        (
            UsageError("damaged: to continue from it, leeway run --resume o --resume-from 4"),
            True,
            (
                "launcher",
                "damaged: to continue from it, leeway run --resume o --resume-from 4",
                "leeway run --resume o --resume-from 4",
            ),
        ),
        (Interrupted("stopped by SIGINT"), True, ("launcher", "stopped by SIGINT", "leeway run --resume o")),
        (KeyError("x"), False, ("launcher", "KeyError: 'x'", "start the run again (logs: o/logs)")),
        (
            RunFailed("long", process="redis", cause="failed for 5 s: no"),
            True,
            ("redis", "failed for 5 s: no", "check the Redis server, then leeway run --resume o"),
        ),
    ],
)
def test_every_error_has_a_process_a_cause_and_a_next_step(
    error: Exception, resumable: bool, reason: tuple[str, str, str]
) -> None:
    assert tuple(find_reason(error, Path("o"), resumable=resumable).as_dict().values()) == reason


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


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_an_ignored_signal_stays_ignored(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            signal.raise_signal(number)
            stop.check()
            expected = (signal.SIGTERM,) if number == signal.SIGINT else (signal.SIGTERM, signal.SIGINT)
            assert stop_signals() == expected
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
