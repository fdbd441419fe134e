"""Leadership by a Lease: of several controllers one works, the others stand by.

The Lease decides who tries; what makes two leaders harmless is the term in Redis (reconcile.py), which the
newer one raises and the older one's next write finds raised.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from leeway.errors import LeewayError

log = logging.getLogger(__name__)


class LeaseLostError(LeewayError):
    """Another controller leads now, or the API server could not be reached for too long."""


class Leadership:
    """Stands for election in a thread.

    start -> (stands by) -> leading -> release | lost
    """

    def __init__(self, kubernetes: Any, name: str, namespace: str, identity: str, lease_s: int) -> None:
        from kubernetes.leaderelection import electionconfig, leaderelection
        from kubernetes.leaderelection.resourcelock.leaselock import LeaseLock

        class Lock(LeaseLock):
            closed = False

            def create(self, name: str, namespace: str, election_record: Any) -> Any:
                # The chart makes the Lease, so that it goes with the release: who is still ending while the
                # release is uninstalled must not leave a new one behind.
                log.error("there is no lease %s in namespace %s; it is part of the release", name, namespace)
                return False

            def update(self, name: str, namespace: str, updated_record: Any) -> Any:
                # The election's thread cannot be stopped; it must not take back what was given back.
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
        """Stand for election."""
        self._thread.start()

    def _run(self) -> None:
        try:
            self._election.run()
        except Exception:  # whatever ends the election, who cannot renew must not lead
            log.exception("the election ended")
            self.lost.set()

    def release(self) -> None:
        """Give the lease back, so that the next one need not wait until it has run out. Best effort."""
        record = self._election.observed_record
        if self.leading.is_set() and not self.lost.is_set() and record is not None:
            name, namespace = self._lock.name, self._lock.namespace
            record.holder_identity = None
            for _ in range(3):  # the thread may renew in between
                self._lock.get(name, namespace)
                if self._lock.update(name, namespace, record):
                    break
            self._lock.closed = True
