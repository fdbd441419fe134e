"""Issuing a batch: its tickets, written in one MULTI with the state that counts them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from leeway.config import RunConfig
from leeway.messages import Ticket, encode
from leeway.streams import add_fields
from leeway.telemetry.tracing import messaging, span, traceparent, tracing
from leeway_controller import metrics
from leeway_controller.plan import plan_batch, plan_tickets
from leeway_controller.store import StateStore

log = logging.getLogger(__name__)

PromptEncoder = Callable[[int], list[int]]
"""Token ids of the prompt of an item of the data set."""


class TicketIssuer:
    """Writes the tickets of a batch. `size`: number of items in the data set."""

    def __init__(self, store: StateStore, config: RunConfig, encode_item: PromptEncoder, size: int) -> None:
        self.store, self.config, self.encode_item, self.size = store, config, encode_item, size

    def issue(self, batch: int) -> None:
        """Write the tickets of `batch` under the current version. Raises DeposedError, RedisUnavailable."""
        state = self.store.state
        attributes = {"leeway.batch": batch, "leeway.version": state.current, "leeway.epoch": state.epoch}
        with span("plan batch", attributes, root=True):
            tickets = [self._traced(ticket) for ticket in self._plan(batch)]

            def effects(pipe: Any) -> None:
                for ticket in tickets:
                    add_fields(pipe, self.store.keys.tickets, encode(ticket))

            self.store.commit(state.issued(batch), effects)
        metrics.batch_issued()
        log.debug("batch %d issued under version %d", batch, state.current)

    def _plan(self, batch: int) -> list[Ticket]:
        config, state = self.config, self.store.state
        assert state.current is not None  # plan_issue names no batch before
        items = plan_batch(self.size, config.order_seed, batch, config.batch.prompts)
        return plan_tickets(
            items,
            [self.encode_item(item) for item in items],
            seed=config.seed,
            epoch=state.epoch,
            version=state.current,
            batch=batch,
            group_size=config.batch.group_size,
            max_new_tokens=config.sampling.max_new_tokens,
            config=state.config,
        )

    def _traced(self, ticket: Ticket) -> Ticket:
        """The ticket with the context of its own span, the parent of everything done for it."""
        if not tracing():
            return ticket
        header = ticket.header
        attributes = {
            **messaging("send", self.store.keys.tickets, header.ticket_id),
            "leeway.batch": header.batch,
            "leeway.version": header.version,
        }
        with span("ticket", attributes, kind="producer"):
            return replace(ticket, header=header.model_copy(update={"traceparent": traceparent()}))
