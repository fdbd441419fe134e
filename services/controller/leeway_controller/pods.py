"""PodWatch: tells the controller that a sampler's process is gone before its heartbeat is overdue.

watch of the samplers' pods -> find_loss -> on_loss -> the controller's next pass
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from leeway.kube import Cluster, PodView, find_loss, view_pod

log = logging.getLogger(__name__)

WATCH_S = 60
RETRY_S = 5.0


class PodWatch:
    """Watches in a thread and calls `on_loss(sampler, why)` there; a sampler is named after its pod."""

    def __init__(self, cluster: Cluster, on_loss: Callable[[str, str], None]) -> None:
        self._cluster, self._on_loss = cluster, on_loss
        self._views: dict[str, PodView] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pods", daemon=True)

    def start(self) -> None:
        """Start watching; the thread ends with the process."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, at the latest when the current watch request ends."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                for kind, pod in self._cluster.watch_samplers(WATCH_S):
                    self.see(view_pod(pod), gone=kind == "DELETED")
            except Exception as exc:  # noqa: BLE001 (whatever it is, losses still show by missing heartbeats)
                log.warning("watching pods: %s; retrying", exc)
                self._stop.wait(RETRY_S)

    def see(self, view: PodView, gone: bool) -> None:
        """Handle one view of a pod; `gone`: it was deleted."""
        why = find_loss(self._views.get(view.name), view, gone)
        if why is not None:
            self._on_loss(view.name, why)
        if gone:
            self._views.pop(view.name, None)
        else:
            self._views[view.name] = view
