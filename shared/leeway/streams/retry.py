"""Calls repeated while the server is away, within a budget."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

import redis
from redis.exceptions import (
    AuthenticationError,
    ClusterDownError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_exponential

from leeway.errors import LeewayError

log = logging.getLogger(__name__)

LOST = (redis.ConnectionError, redis.TimeoutError, redis.WatchError)
"""Errors of a connection that was lost; whether the server executed the call is unknown. redis-py reports a
connection that is lost between WATCH and EXEC as a WatchError."""
NOT_NOW = (OutOfMemoryError, ReadOnlyError, ClusterDownError, MasterDownError, TryAgainError)
"""Errors of a server that is full, a replica, or in a failover: it executed nothing, and will later."""
NOT_NOW_CODE = re.compile(r"\b(MISCONF|NOREPLICAS|UNBLOCKED|BUSY)\b")
"""Codes of such errors that have no class of their own: a full disk, too few replicas, a read that a failover
ended, a script that takes long.
"""
T = TypeVar("T")


class RedisUnavailable(LeewayError):
    """The server did not answer within the budget."""


def _is_transient(error: BaseException) -> bool:
    # A refused password or certificate is a ConnectionError in redis-py, but waiting does not help.
    if isinstance(error, AuthenticationError) or "CERTIFICATE_VERIFY_FAILED" in str(error):
        return False
    if isinstance(error, ResponseError) and NOT_NOW_CODE.search(str(error)):
        return True
    return isinstance(error, (*LOST, *NOT_NOW))


def retrying(call: Callable[[], T], *, budget_s: float, what: str) -> T:
    """The result of `call()`, repeated while the server is unreachable, full or in a failover.

    Raises RedisUnavailable that names `what` after `budget_s` seconds; other errors are raised at once.
    """

    def give_up(state: RetryCallState) -> T:
        error = state.outcome.exception() if state.outcome else None
        raise RedisUnavailable(f"{what}: failed for {budget_s:g} s: {error}") from error

    def note(state: RetryCallState) -> None:
        if state.attempt_number in (2, 10, 100):
            log.warning("%s: %s; retrying", what, state.outcome.exception() if state.outcome else "")

    retry = Retrying(
        retry=retry_if_exception(_is_transient),
        wait=wait_exponential(multiplier=0.05, max=1.0),
        stop=stop_after_delay(budget_s),
        before_sleep=note,
        retry_error_callback=cast(Any, give_up),
    )
    return retry(call)
