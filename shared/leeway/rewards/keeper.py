"""`python -m leeway.rewards.keeper FD`: the parent of one reward worker, which outlives everything below it.

    sampler ---- socket ----+
       |                    |
       +-- keeper (session of its own, adopts orphans)
             +-- worker: scores responses
                   +-- whatever reward functions start, in whichever session

The kernel makes orphans below the keeper its children (PR_SET_CHILD_SUBREAPER), so none escapes by forking
twice or by a session of its own. The keeper kills all of them and exits when

    the worker has ended        its exit status becomes the keeper's
    the socket is hung up       the pool closed it (a timeout, the end), or its owner has died

The keeper has no secrets in its environment (leeway.rewards.environment), and neither have its children. What
daemons start on request (systemd, Docker) is not below the keeper.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time

import psutil

from leeway.process import die_with_parent
from leeway.rewards.worker import SIGNALLED, serve

PR_SET_CHILD_SUBREAPER = 36
KILL_BUDGET_S = 4.0
OWNER_CHECK_S = 1.0


def main(fd: int) -> int:
    """Start a worker that serves the socket `fd`, wait until it ends or the owner hangs up, and clean up."""
    owner, keeper = os.getppid(), os.getpid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the owner decides, by the socket
    os.set_inheritable(fd, False)
    worker = os.fork()
    if worker == 0:
        die_with_parent(keeper)
        for number in (signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        serve(fd, keeper)
        os._exit(0)
    status = _wait(fd, worker, owner)
    if not kill_descendants(KILL_BUDGET_S):
        print(f"reward keeper: some processes did not end within {KILL_BUDGET_S:g} s", file=sys.stderr)
    return status


def _wait(fd: int, worker: int, owner: int) -> int:
    """The exit status of the worker; 0 if the owner hung up or died first."""
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(fd, 0)  # a hang-up is always reported
    poll.register(wake, select.POLLIN)
    while True:
        status = _reap(worker)
        if status is not None:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else SIGNALLED - code
        for ready, events in poll.poll(OWNER_CHECK_S * 1000):
            if ready == fd and events & (select.POLLHUP | select.POLLERR):
                return 0
            if ready == wake:
                os.read(wake, 4096)
        if os.getppid() != owner:
            return 0


def _reap(worker: int) -> int | None:
    """Reap children that have ended, orphans among them; the status of `worker` if it is one of them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == worker:
            found = status


def kill_descendants(budget_s: float) -> bool:
    """SIGKILL to everything below this process until nothing is left; False if `budget_s` was too short."""
    deadline = time.monotonic() + budget_s
    while True:
        for process in psutil.Process().children(recursive=True):
            try:
                process.kill()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue  # it has ended, or changed its user
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
