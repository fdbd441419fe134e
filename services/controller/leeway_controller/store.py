"""The run's state in Redis, and the term that decides which controller may write it.

    term     HINCRBY when a controller starts; the highest term owns the run
    commit   WATCH state -> is the term still ours? -> MULTI effects, state EXEC
    lost     the term is below ours: the server lost the run's data. A new term above ours, an empty state

A verdict or a ticket is written in the same MULTI as the state that it belongs to, so that a restarted
controller continues exactly there, and a replaced one writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import redis

from leeway.config.identity import Identity
from leeway.errors import LeewayError
from leeway.streams import (
    CONFIG_FIELD,
    CONTROLLER_CONFIG_FIELD,
    MANUAL_FIELD,
    STATE_FIELD,
    TERM_FIELD,
    Keys,
    now,
    retrying,
)
from leeway_controller.state import ControllerState

COMMIT_ATTEMPTS = 100
Effects = Callable[[Any], None]
"""Queues writes on the pipeline it is given."""


class DeposedError(LeewayError):
    """A newer controller works on the run; this one has written nothing since."""


class StateLostError(LeewayError):
    """The server lost the run's data, and with it what this controller committed."""


class StateStore:
    """The state of one run. `state` is what was committed last."""

    def __init__(self, client: redis.Redis, keys: Keys, *, identity: Identity, budget_s: float) -> None:
        self.client, self.keys, self.identity, self.budget_s = client, keys, identity, budget_s
        # Before the state is read: from here on an older controller cannot change it.
        self.term: int = self._retry(self._count, "counting controllers")
        self.state = ControllerState.load(client, keys, budget_s=budget_s)
        self._committed: bytes | None = None
        """What this controller wrote last; None before its first commit."""

    def _count(self) -> int:
        with self.client.pipeline(transaction=True) as pipe:
            pipe.hincrby(self.keys.state, TERM_FIELD, 1)
            pipe.hset(self.keys.state, CONTROLLER_CONFIG_FIELD, self.identity.text)
            return int(pipe.execute()[0])

    def check(self) -> bool:
        """Whether the server has what was committed last; after a failover it may have an older state.

        Raises DeposedError or StateLostError if the state on the server is not this controller's.
        """
        term, state = self._retry(
            lambda: self.client.hmget(self.keys.state, TERM_FIELD, STATE_FIELD), "reading the term"
        )
        self._check_term(int(term or 0))
        return self._committed is None or state == self._committed

    def begin_again(self) -> None:
        """Take the run over on a server that lost its data: a new term, an empty state.

        Raises DeposedError if another controller has done so.
        """
        term = int(1000 * now())  # above all that were counted, and no other controller's

        def check(found: int) -> None:
            if found > self.term and found != term:  # `term`: a repeated attempt
                raise self._deposed(found)

        def effects(pipe: Any) -> None:
            fields = {TERM_FIELD: term, CONTROLLER_CONFIG_FIELD: self.identity.text}
            pipe.hset(self.keys.state, mapping=cast(Any, fields))

        self._retry(lambda: self._write(ControllerState(), effects, check), "beginning again")
        self.term = term
        self._remember(ControllerState())

    def _check_term(self, found: int) -> None:
        if found > self.term:
            raise self._deposed(found)
        if found < self.term:
            raise StateLostError(f"the server has term {found}, this controller has {self.term}")

    def _deposed(self, by: int) -> DeposedError:
        return DeposedError(f"controller {by} of this run has replaced this one ({self.term})")

    def _retry(self, call: Callable[[], Any], what: str) -> Any:
        return retrying(call, budget_s=self.budget_s, what=what)

    def commit(self, state: ControllerState, effects: Effects = lambda pipe: None) -> None:
        """Write effects and state in one MULTI. Raises DeposedError, StateLostError, RedisUnavailable."""
        self._retry(lambda: self._write(state, effects, self._check_term), "writing the state")
        self._remember(state)

    def _remember(self, state: ControllerState) -> None:
        self.state, self._committed = state, state.model_dump_json().encode()

    def _write(self, state: ControllerState, effects: Effects, check: Callable[[int], None]) -> None:
        """`check` raises if the term that the server has is not one to write under."""
        with self.client.pipeline(transaction=True) as pipe:
            for _ in range(COMMIT_ATTEMPTS):
                cast(Any, pipe).watch(self.keys.state)
                check(int(cast(Any, pipe.hget(self.keys.state, TERM_FIELD)) or 0))
                pipe.multi()
                effects(pipe)
                pipe.hset(self.keys.state, STATE_FIELD, state.model_dump_json())
                try:
                    pipe.execute()
                    return
                except redis.WatchError:
                    continue  # another field changed: an epoch, a request for a resync
        raise redis.ConnectionError(
            f"the state changed during each of {COMMIT_ATTEMPTS} attempts to write it"
        )

    def trainer_identity(self) -> Identity:
        """The configuration of the newest run epoch; an empty one if the server has none."""
        raw = self._retry(lambda: self.client.hget(self.keys.state, CONFIG_FIELD), "reading the state")
        return Identity("" if raw is None else raw.decode())

    def manual_resync_requested(self) -> bool:
        """Whether a person asked for a resync that has not been answered yet."""
        return bool(
            self._retry(lambda: self.client.hexists(self.keys.requests, MANUAL_FIELD), "reading the state")
        )

    def queue_manual_resync_done(self, pipe: Any) -> None:
        """An effect: the request for a resync is answered."""
        pipe.hdel(self.keys.requests, MANUAL_FIELD)
