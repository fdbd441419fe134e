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

# Fields of the hash `requests`, what a person asked for.
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
        """The names of the samplers, see `leeway.statuses`."""
        return self.key("samplers")

    def sampler(self, name: str) -> str:
        """The status of one sampler."""
        return self.key(f"samplers:{name}")

    @property
    def fences(self) -> str:
        return self.key("fences")

    @property
    def state(self) -> str:
        return self.key("state")

    @property
    def requests(self) -> str:
        """What a person asked for; separate from `state`, on which the authority of services rests."""
        return self.key("requests")

    @property
    def rejected(self) -> str:
        """Rollouts that the trainer could not use, see `leeway_trainer.rejects`."""
        return self.key("rejected")

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

    @property
    def weight_streams(self) -> str:
        """The names of all streams of chunks, so that nobody needs to search the server's keys."""
        return self.key("weights:streams")

    def weight_chunks(self, epoch: int, version: int) -> str:
        """Of one weight version; trainers of different run epochs never write to the same key."""
        return self.key(f"weights:{epoch}.{version}")
