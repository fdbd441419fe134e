"""What a stalled run is said to wait for."""

from __future__ import annotations

import pytest

from leeway_controller.progress import describe_wait
from leeway_controller.state import ControllerState


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (ControllerState(), "the trainer's start"),
        (ControllerState(epoch=1, current=1, awaiting=2), "version 2 from the trainer"),
        (ControllerState(epoch=1, current=1, pending=2), "version 2 to be attested"),
        (ControllerState(epoch=1, current=1, next_step=4), "the report of step 4"),
    ],
)
def test_what_the_run_waits_for(state: ControllerState, text: str) -> None:
    assert describe_wait(state) == text
