"""PodWatch: tells the controller that a sampler's process is gone before its heartbeat is missed.

watch of the samplers' pods -> find_loss -> queue `lost` -> the controller's next tick
"""

from __future__ import annotations

import logging
import queue
import threading

from leeway.kube import Cluster, PodView, find_loss, view_pod

log = logging.getLogger(__name__)

WATCH_S = 60
RETRY_S = 5.0


class PodWatch:
    """A thread that watches. `lost` gets (sampler, why); a sampler is named like its pod."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.lost: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._views: dict[str, PodView] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pods", daemon=True)

    def start(self) -> None:
        """Begin to watch; the thread ends with the process."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no more, at the latest when the watch in hand ends."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                for kind, pod in self._cluster.watch_samplers(WATCH_S):
                    self.see(view_pod(pod), gone=kind == "DELETED")
            except Exception as exc:  # noqa: BLE001 (whatever it is, heartbeats still tell of losses)
                log.warning("watching pods: %s; trying again", exc)
                self._stop.wait(RETRY_S)

    def see(self, view: PodView, gone: bool) -> None:
        """One event."""
        why = find_loss(self._views.get(view.name), view, gone)
        if why is not None:
            self.lost.put((view.name, why))
        if gone:
            self._views.pop(view.name, None)
        else:
            self._views[view.name] = view
