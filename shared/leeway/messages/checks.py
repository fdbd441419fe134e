"""Whether a message's header and arrays fit together; applied when it is written and when it is read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from leeway.messages.headers import MessageError

if TYPE_CHECKING:
    from leeway.messages.kinds import Rollout, Ticket

LOGP_SLACK = 1e-3
"""How far above 0 nats rounding may lift a log-probability."""


def check_ticket(ticket: Ticket) -> None:
    """Raise MessageError unless there is a prompt of valid token ids."""
    if ticket.prompt_ids.size == 0:
        raise MessageError(f"ticket {ticket.header.ticket_id}: the prompt is empty")
    if ticket.prompt_ids.min() < 0:
        raise MessageError(f"ticket {ticket.header.ticket_id}: negative token id in the prompt")


def check_rollout(rollout: Rollout) -> None:
    """Raise MessageError unless shapes fit, all numbers are finite log-probabilities, and every token carries
    the header's version.
    """
    name = f"rollout {rollout.header.ticket_id}"
    _check_shapes(rollout, name)
    for array_name in ("prompt_ids", "response_ids", "head_ids"):
        array = getattr(rollout, array_name)
        if array.size and array.min() < 0:
            raise MessageError(f"{name}: negative token id in {array_name}")
    for array_name in ("logp", "head_logp"):
        array = getattr(rollout, array_name)
        if not np.isfinite(array).all() or (array.size and array.max() > LOGP_SLACK):
            raise MessageError(f"{name}: {array_name} holds values that are not log-probabilities")
    if not math.isfinite(rollout.header.reward):
        raise MessageError(f"{name}: reward {rollout.header.reward} is not finite")
    expected = [(0, rollout.response_ids.size, rollout.header.version)]
    if [tuple(span) for span in rollout.header.spans] != expected:
        raise MessageError(
            f"{name}: version spans {rollout.header.spans}, expected {expected} (one version throughout)"
        )


def _check_shapes(rollout: Rollout, name: str) -> None:
    tokens = rollout.response_ids.size
    if rollout.prompt_ids.size == 0 or tokens == 0:
        raise MessageError(f"{name}: prompt or response is empty")
    if rollout.logp.size != tokens or rollout.head_offsets.size != tokens + 1:
        raise MessageError(
            f"{name}: {tokens} response tokens, but {rollout.logp.size} log-probs and "
            f"{rollout.head_offsets.size} head offsets (expected one more than tokens)"
        )
    sizes = np.diff(rollout.head_offsets.astype(np.int64))  # in int32 a difference may wrap around
    entries = rollout.head_ids.size
    if rollout.head_offsets[0] != 0 or (sizes < 0).any() or rollout.head_offsets[-1] != entries:
        raise MessageError(f"{name}: head offsets do not describe {entries} head entries")
    if entries != rollout.head_logp.size:
        raise MessageError(f"{name}: {entries} head ids but {rollout.head_logp.size} log-probs")
