"""What ends a trainer, apart from errors that all services share."""

from __future__ import annotations

from leeway.errors import EXIT_INTERRUPTED, LeewayError


class StoppedError(LeewayError):
    """SIGTERM or Ctrl-C: the current step is abandoned."""

    exit_code = EXIT_INTERRUPTED


class NonFiniteError(LeewayError):
    """A number that must be finite is not; the step is rejected and nothing of it is published."""

    def __init__(self, step: int, quantity: str, value: float) -> None:
        super().__init__(
            f"step {step}: {quantity} is {value}, expected a finite number; the step is rejected and nothing "
            "is published. Lower trainer.learning_rate, or resume from the last checkpoint"
        )
        self.step, self.quantity, self.value = step, quantity, value
