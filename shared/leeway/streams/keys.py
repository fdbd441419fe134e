"""Names of a run's streams and keys, of its consumer groups, and of the fields of its hash `state`."""

from __future__ import annotations

from dataclasses import dataclass

TICKETS_GROUP = "samplers"
ROLLOUTS_GROUP = "trainer"
REPORTS_GROUP = "controller"

# Fields of the hash `state`.
EPOCH_FIELD = "epoch"
"""Counts the starts of the trainer; the newest start owns the run."""
OWNER_FIELD = "epoch_owner"
"""The trainer process that has begun that epoch. After a loss of data the count begins again, and two
trainers may have arrived at the same number."""
PUBLISHED_FIELD = "published"
"""The newest weight version that was announced, as <epoch>.<version>. A server that has lost its last writes
has an older one."""
CONFIG_FIELD = "config"
"""The configuration of the newest run epoch: the text of a `leeway.config.identity.Identity`. Written by the
trainer together with the epoch."""
CONTROLLER_CONFIG_FIELD = "controller_config"
"""The same of the newest controller, written together with its term."""
STATE_FIELD = "controller"
"""The controller's state, a `leeway.run_state.RunState` as JSON."""
TERM_FIELD = "controller_term"
"""Counts the controllers of the run; only the newest may write."""
MANUAL_FIELD = "manual_resync"
"""Asks for a resync; the controller removes it together with its verdict."""
KEYFRAME_FIELD = "manual_keyframe"
"""Asks for the next version in full; the trainer removes it."""
SCALE_FIELD = "samplers_wanted"
"""Number of samplers that the local launcher shall run."""


@dataclass(frozen=True)
class Keys:
    """Names of a run's streams and keys; the braces make all of them one Redis Cluster slot."""

    run: str

    def key(self, name: str) -> str:
        return f"leeway:{{{self.run}}}:{name}"

    @property
    def tickets(self) -> str:
        return self.key("tickets")

    @property
    def rollouts(self) -> str:
        return self.key("rollouts")

    @property
    def weights(self) -> str:
        return self.key("weights")

    @property
    def reports(self) -> str:
        return self.key("reports")

    @property
    def verdicts(self) -> str:
        return self.key("verdicts")

    @property
    def events(self) -> str:
        return self.key("events")

    @property
    def samplers(self) -> str:
        return self.key("samplers")

    @property
    def fences(self) -> str:
        return self.key("fences")

    @property
    def state(self) -> str:
        return self.key("state")

    @property
    def suspects(self) -> str:
        """Who lost which ticket, see `leeway_sampler.suspects`."""
        return self.key("suspects")

    @property
    def incarnations(self) -> str:
        """The newest process of each sampler, see `leeway.incarnations`."""
        return self.key("incarnations")

    @property
    def probe(self) -> str:
        """Counts the requests for a probe of every sampler's distribution."""
        return self.key("probe")

    @property
    def checks(self) -> str:
        return self.key("checks")

    def weight_chunks(self, epoch: int, version: int) -> str:
        """Of one weight version; trainers of different run epochs never write to the same key."""
        return self.key(f"weights:{epoch}.{version}")
