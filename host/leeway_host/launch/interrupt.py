"""Ctrl-C and SIGTERM during a run: remembered, and acted on where it is safe."""

from __future__ import annotations

import signal

from leeway.errors import EXIT_INTERRUPTED, LeewayError
from leeway.process import is_ignored

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(LeewayError):
    """The run was stopped by a signal."""

    exit_code = EXIT_INTERRUPTED


class StopRequest:
    """Context manager that records SIGINT, SIGTERM and SIGHUP; `check` raises Interrupted after one.

    A signal that is ignored stays ignored: nohup ignores SIGHUP so that a run outlives its terminal, and a
    shell ignores SIGINT for its background jobs, because Ctrl-C is not meant for them.

    With `immediate` set, the signal also raises Interrupted where it arrives, to cut short work that does not
    call `check`. Python discards such an exception in a few places (a destructor, a callback), which is why
    the signal is recorded as well.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.immediate = False

    def __enter__(self) -> StopRequest:
        heeded = [number for number in STOP_SIGNALS if not is_ignored(number)]
        self._previous = {number: signal.signal(number, self._on_signal) for number in heeded}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        self.number = number
        if self.immediate:
            self.check()

    def check(self) -> None:
        """Raise Interrupted if a signal has arrived."""
        if self.number is not None:
            raise Interrupted(f"stopped by {signal.Signals(self.number).name}")
