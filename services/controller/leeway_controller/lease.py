"""Leadership by a Lease: of several controllers one works, the others stand by.

The Lease decides who may try. What makes two leaders harmless is the term in Redis (`store.py`): the newer
one raises it, and the older one's next write finds it raised and is rejected.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from leeway.errors import LeewayError

log = logging.getLogger(__name__)


class LeaseLostError(LeewayError):
    """Another controller leads, or the API server could not be reached for too long."""


class Leadership:
    """Takes part in the election, in a thread.

    start -> standing by -> leading -> release | lost
    """

    def __init__(self, kubernetes: Any, name: str, namespace: str, identity: str, lease_s: int) -> None:
        from kubernetes.leaderelection import electionconfig, leaderelection
        from kubernetes.leaderelection.resourcelock.leaselock import LeaseLock

        class Lock(LeaseLock):  # type: ignore[misc]  # kubernetes has no types
            closed = False

            def create(self, name: str, namespace: str, election_record: Any) -> Any:
                # The Lease belongs to the release and is deleted with it: a controller that is still shutting
                # down while the release is uninstalled must not create a new one.
                log.error("lease %s not found in namespace %s; the chart creates it", name, namespace)
                return False

            def update(self, name: str, namespace: str, updated_record: Any) -> Any:
                # The election's thread cannot be stopped; it must not acquire again what was released.
                return not self.closed and super().update(name, namespace, updated_record)

        logging.getLogger("leaderelection").setLevel(logging.WARNING)
        self.leading, self.lost = threading.Event(), threading.Event()
        self._lock = Lock(name, namespace, identity)
        config = electionconfig.Config(
            self._lock,
            lease_duration=lease_s,
            renew_deadline=lease_s * 2 // 3,
            retry_period=max(1, lease_s // 7),
            onstarted_leading=self.leading.set,
            onstopped_leading=self.lost.set,
        )
        self._election = leaderelection.LeaderElection(config)
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def start(self) -> None:
        """Take part in the election from now on."""
        self._thread.start()

    def wait(self, stop: threading.Event) -> None:
        """Wait until this controller leads, or `stop` is set. Raises LeaseLostError."""
        log.info("standing by for lease %s", self._lock.name)
        while not (self.leading.is_set() or self.lost.is_set() or stop.is_set()):
            self.leading.wait(0.2)
        if self.lost.is_set():
            raise LeaseLostError(f"lease {self._lock.name}: the election ended before this controller led")
        if self.leading.is_set():
            log.info("%s leads", self._lock.identity)

    def _run(self) -> None:
        try:
            self._election.run()
        except Exception:  # whatever ends the election: a controller that cannot renew must not lead
            log.exception("the election ended")
            self.lost.set()

    def release(self) -> None:
        """Release the lease, so that the next controller need not wait until it expires. Best effort."""
        record = self._election.observed_record
        if self.leading.is_set() and not self.lost.is_set() and record is not None:
            name, namespace = self._lock.name, self._lock.namespace
            record.holder_identity = None
            for _ in range(3):  # the thread may renew in between
                self._lock.get(name, namespace)
                if self._lock.update(name, namespace, record):
                    break
            self._lock.closed = True
