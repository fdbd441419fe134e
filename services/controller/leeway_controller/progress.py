"""Is the run making progress? If not, it ends with a diagnosis."""

from __future__ import annotations

import time
from collections.abc import Sequence

import redis

from leeway.config import RunConfig
from leeway.config.identity import identify, short
from leeway.diagnose import describe_tickets, is_stalled
from leeway.errors import StalledError
from leeway.messages import SamplerStatus
from leeway.streams import Keys
from leeway_controller.samplers import SamplerRoster
from leeway_controller.state import ControllerState


class ProgressWatch:
    """Progress is a report, a manifest, a version that became current, or a response of a live sampler."""

    def __init__(self, client: redis.Redis, keys: Keys, config: RunConfig) -> None:
        self.client, self.keys, self.config = client, keys, config
        self._digest = identify(config).digest
        self.at = time.monotonic()
        """When the last progress was seen (monotonic clock, seconds)."""
        self.stepped = False
        """A step was reported since this controller started, so engines are up."""
        self._responses = 0

    def seen(self) -> None:
        """There was progress now."""
        self.at = time.monotonic()

    def count_responses(self, live: Sequence[SamplerStatus]) -> None:
        """A step may take long while responses keep coming: these are progress too."""
        responses = sum(status.tickets for status in live)
        if responses > self._responses:
            self.seen()
        self._responses = responses

    def check(self, state: ControllerState, samplers: SamplerRoster) -> None:
        """Raise StalledError after sync.stall_timeout_s without progress.

        Until the first step, and while a service restarts, sampler.start_timeout_s counts as well.
        """
        stalled_s, limit_s = time.monotonic() - self.at, self.config.sync.stall_timeout_s
        start_s = self.config.sampler.start_timeout_s
        if not self.stepped:
            limit_s = max(limit_s, start_s)
        if state.finished or not is_stalled(self.client, self.keys, stalled_s, limit_s, start_s):
            return
        raise StalledError(
            f"no progress for {stalled_s:.0f} s: waiting for {describe_wait(state, self._digest)}; "
            f"{samplers.describe()}; "
            f"{describe_tickets(self.client, self.keys)}"
        )


def describe_wait(state: ControllerState, config: str = "") -> str:
    """What the run waits for in `state`; `config`: digest of the controller's configuration."""
    if state.epoch < 0:
        return "the trainer's start"
    if state.config != config:
        return f"a trainer of configuration {short(config)} (it has {short(state.config)})"
    if state.awaiting is not None:
        return f"version {state.awaiting} from the trainer"
    if state.pending is not None:
        return f"version {state.pending} to be attested"
    return f"the report of step {state.next_step}"
