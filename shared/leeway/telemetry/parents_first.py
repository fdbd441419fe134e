"""Exports parent spans before their children, so that a killed process leaves no orphan spans."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace import SpanProcessor

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan, Span


class ParentsFirst(SpanProcessor):
    """Holds an ended span until its parent has ended, then passes both on, the parent first.

    The batch processor exports ended spans on a timer. The parent of an exported span may still be open then,
    and a process that is killed (SIGKILL, out of memory) never exports it.
    """

    def __init__(self, then: SpanProcessor) -> None:
        self._then, self._lock = then, threading.Lock()
        self._held: dict[int, list[ReadableSpan]] = {}
        """Id of each open span of this process -> its descendants that have ended."""

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        with self._lock:
            self._held[span.get_span_context().span_id] = []
        self._then.on_start(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        with self._lock:
            done = [span, *self._held.pop(span.context.span_id, ())]
            above = self._held.get(span.parent.span_id) if span.parent else None
            if above is not None:
                above.extend(done)
                return
        for ended in done:
            self._then.on_end(ended)

    def shutdown(self) -> None:
        self._then.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._then.force_flush(timeout_millis)
