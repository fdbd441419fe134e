"""What keeps reward code away from the processes that it serves. Linux only; called in the worker.

    Landlock    the worker and all below it can neither read nor trace other processes (/proc/PID/environ,
                mem, fd), nor, with a recent kernel, signal them. Needs kernel 5.19 and no privileges.
    user id     a process of root changes to the user `task.reward_user`, whose files are not root's
    limits      no core dumps, at most MAX_FILES open files (memory: leeway.rewards.worker)

Neither Landlock nor another user id is there everywhere; `leeway doctor` says what a machine has.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import resource
import struct
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from leeway.config.task import TaskConfig
from leeway.tasks.base import TaskError

MAX_FILES = 4096
# System calls, numbered alike on all architectures; constants of <linux/landlock.h> and <linux/prctl.h>.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
RULESET_VERSION, RULE_PATH_BENEATH = 1, 1
MAKE_BLOCK, REFER = 1 << 11, 1 << 13
SCOPE_SIGNAL = 1 << 1
PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 4, 38
REFER_SINCE, SCOPES_SINCE = 2, 6
"""Versions of Landlock."""
DEFAULT_USER = "nobody"


def landlock_version() -> int:
    """The kernel's version of Landlock, 0 if there is none that can be used."""
    if sys.platform != "linux":
        return 0
    found: int = ctypes.CDLL(None, use_errno=True).syscall(CREATE_RULESET, None, 0, RULESET_VERSION)
    return found if found >= REFER_SINCE else 0


def restrict_self() -> bool:
    """Put this process into a Landlock domain of its own; False if the kernel does not offer it.

    A process in a domain cannot trace or inspect one outside. No file is forbidden: who loads modules and
    data needs most of them.
    """
    version = landlock_version()
    if not version:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    # A domain has to handle something: the creation of block devices, and links between directories, which
    # are otherwise forbidden. Both are allowed again everywhere.
    handled = MAKE_BLOCK | REFER
    attributes = struct.pack("=QQQ", handled, 0, SCOPE_SIGNAL if version >= SCOPES_SINCE else 0)
    size = len(attributes) if version >= SCOPES_SINCE else 8
    ruleset = libc.syscall(CREATE_RULESET, attributes, size, 0)
    if ruleset < 0:
        return False
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", handled, root)
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        return bool(
            libc.syscall(ADD_RULE, ruleset, RULE_PATH_BENEATH, rule, 0) == 0
            and libc.syscall(RESTRICT_SELF, ruleset, 0) == 0
        )
    finally:
        os.close(root)
        os.close(ruleset)


@dataclass(frozen=True)
class Isolation:
    """How reward code is kept apart. `user`: the user that it runs as, None for the one it is started by."""

    user: pwd.struct_passwd | None
    landlock: int
    """The kernel's version of Landlock, 0 without."""
    why_not: str = ""
    """Why it does not run as another user."""

    def describe(self) -> str:
        """One line for logs and `leeway doctor`."""
        who = f"as user {self.user.pw_name}" if self.user else f"as the same user ({self.why_not})"
        able = "cannot" if self.user or self.landlock else "CAN"
        return f"reward code runs {who} and {able} read the memory and environment of other processes"


def plan_isolation(config: TaskConfig) -> Isolation:
    """What this process can do for the reward code of `config`.

    Raises TaskError if `task.reward_user` is not there, cannot be changed to, or cannot read what it needs.
    """
    wanted, landlock = config.reward_user, landlock_version()
    own = os.getuid()
    if own != 0:
        if wanted is not None and wanted != pwd.getpwuid(own).pw_name:
            raise TaskError(
                f"task.reward_user: {wanted}: only root can change to another user, and this process runs as "
                f"user {own}; remove the key"
            )
        return Isolation(None, landlock, "only root can change the user")
    try:
        user = pwd.getpwnam(wanted or DEFAULT_USER)
    except KeyError:
        if wanted is not None:
            raise TaskError(f"task.reward_user: there is no user {wanted!r} on this machine") from None
        return Isolation(None, landlock, f"there is no user {DEFAULT_USER}")
    if user.pw_uid == own:
        return Isolation(None, landlock, f"task.reward_user: {wanted}")
    hidden = unreadable(user, needed_places(config))
    if hidden is None:
        return Isolation(user, landlock)
    text = f"user {user.pw_name} cannot read {hidden}"
    if wanted is not None:
        raise TaskError(f"task.reward_user: {text}, which reward code needs: change its mode, or the user")
    return Isolation(None, landlock, text)


def isolate(isolation: Isolation) -> None:
    """Keep this process, and all that it starts, apart from the others; there is no way back."""
    limit_resources()
    if isolation.user:
        change_user(isolation.user)
    if isolation.landlock:
        restrict_self()


def unreadable(user: pwd.struct_passwd, places: Iterable[str | Path]) -> Path | None:
    """The first of `places` that exists and that `user` cannot read, if any."""
    modes = {Path(place): os.R_OK | (os.X_OK if Path(place).is_dir() else 0) for place in places}
    answer, wrote = os.pipe()
    pid = os.fork()
    if pid == 0:
        found = b"?"  # whatever goes wrong in here counts as unreadable
        try:
            os.setgroups([])
            os.setgid(user.pw_gid)
            os.setuid(user.pw_uid)
            found = next(
                (os.fsencode(path) for path, mode in modes.items() if not os.access(path, mode)), b""
            )
        finally:
            os.write(wrote, found)
            os._exit(0)
    os.close(wrote)
    with os.fdopen(answer, "rb") as file:
        hidden = file.read()
    os.waitpid(pid, 0)
    return Path(os.fsdecode(hidden)) if hidden else None


def needed_places(config: TaskConfig) -> list[Path]:
    """What reward code needs to read: Python, what it imports, the task's files, the working directory."""
    paths = [*(Path(name) for name in (sys.executable, *sys.path) if name), *config.files, Path.cwd()]
    return [path for path in dict.fromkeys(paths) if path.exists()]


def change_user(user: pwd.struct_passwd) -> None:
    """Become `user` for good, with a home directory that it can write to."""
    os.setgroups([])
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)
    os.environ |= {"USER": user.pw_name, "LOGNAME": user.pw_name}
    if not os.access(os.environ.get("HOME", ""), os.W_OK | os.X_OK):
        os.environ["HOME"] = tempfile.gettempdir()
    if sys.platform == "linux":
        # The kernel has hidden the process from its own user, who is to see his own children.
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)


def limit_resources() -> None:
    """No core dumps, and a bounded number of open files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
