"""The state of a run as the controller keeps it in the field `controller` of the hash `state`.

The controller alone writes it (`leeway_controller.store`); `leeway status` reads it.
"""

from __future__ import annotations

from typing import Self

import redis
from pydantic import BaseModel, ConfigDict, ValidationError

from leeway.messages import MessageError
from leeway.streams import STATE_FIELD, Keys, retrying


class RunState(BaseModel):
    """Everything that must survive a restart of the controller."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    epoch: int = -1
    """Run epoch: counts the starts of the trainer; -1 before the first."""
    config: str = ""
    """Digest of the trainer's configuration in this epoch; tickets are issued by a controller with the
    same."""
    next_step: int = 0
    """The batch that the trainer trains next."""
    next_issue: int = 0
    """The first batch without tickets under the current version."""
    current: int | None = None
    """The version that every live sampler attested; None before the first."""
    pending: int | None = None
    """A published version that not all samplers have attested yet."""
    digest: str = ""
    """Digest of the newest published version: `pending`, or else `current`."""
    pending_since: float = 0.0
    """Unix time when `pending` was seen."""
    awaiting: int | None = None
    """A version that a verdict asked for and the trainer has not published yet."""
    finished: bool = False

    @property
    def newest(self) -> int:
        """The newest version that was published; -1 before the first."""
        return max(v for v in (self.current, self.pending, -1) if v is not None)

    @classmethod
    def load(cls, client: redis.Redis, keys: Keys, *, budget_s: float) -> Self:
        """The stored state; the initial one if there is none. Raises MessageError, RedisUnavailable."""
        raw = retrying(
            lambda: client.hget(keys.state, STATE_FIELD), budget_s=budget_s, what="reading the state"
        )
        if raw is None:
            return cls()
        try:
            return cls.model_validate_json(raw)
        except ValidationError as exc:
            first = exc.errors(include_url=False)[0]
            raise MessageError(
                f"state of run {keys.run}: {first['loc']}: {first['msg']}; was it written by another version "
                "of Leeway?"
            ) from exc
