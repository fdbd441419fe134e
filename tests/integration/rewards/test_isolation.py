"""What reward code sees of the processes that it serves: it tries to read and signal them."""

from __future__ import annotations

import json
import os
import platform
import pwd
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from leeway.rewards.isolation import SCOPES_SINCE, landlock_version, plan_isolation, unreadable
from leeway.tasks import TaskError, task_config

SHARED = Path(__file__).parents[3] / "shared"
SITE = next(path for path in sys.path if path.endswith("site-packages"))
LOOK = """
import json, os, resource, signal

def attempt(act):
    try:
        return act()
    except OSError as error:
        return type(error).__name__

def read(path, size=1 << 16):
    with open(path, "rb") as file:
        return "SECRET" if b"hunter2" in file.read(size) else "read"

def score(response):
    owner = int(response)
    seen = {name: attempt(lambda: read(f"/proc/{owner}/{name}")) for name in ("environ", "maps")}
    seen["mem"] = attempt(lambda: open(f"/proc/{owner}/mem", "rb").close() or "opened")
    seen["fd"] = attempt(lambda: os.open(f"/proc/{owner}/fd/0", os.O_RDONLY) and "opened")
    seen["signal"] = attempt(lambda: os.kill(owner, signal.SIGCONT) or "sent")
    seen["private file"] = attempt(lambda: read("private"))
    seen["own variables"] = sorted(name for name in os.environ if "LEEWAY" in name or "REDIS" in name)
    seen["own environment"] = attempt(lambda: read("/proc/self/environ"))
    seen["user"] = os.getuid()
    seen["core"] = resource.getrlimit(resource.RLIMIT_CORE)[0]
    os.makedirs("scratch/a", exist_ok=True)
    os.makedirs("scratch/b", exist_ok=True)
    open("scratch/a/x", "w").close()
    os.rename("scratch/a/x", "scratch/b/x")  # between directories
    with open("seen.json", "w") as file:
        json.dump(seen, file)
    return 1.0
"""
OWNER = """
    import asyncio, os, sys
    from leeway.process import secret
    from leeway.rewards import RewardPool
    from leeway.tasks import task_config

    async def main():
        url = secret(sys.argv[1])
        assert "hunter2" in url
        async with RewardPool(task_config(kind="digits", reward="look:score"), workers=1) as pool:
            print(await pool.score(0, str(os.getpid())))

    asyncio.run(main())
"""


def python_for(user: str) -> str | None:
    """A Python of this version that `user` can read, with the packages that rewards need."""
    places = [SHARED, Path(SITE)]
    for path in (sys.executable, "/usr/bin/python3"):
        if (
            Path(path).exists()
            and unreadable(pwd.getpwnam(user), [path, Path(path).resolve(), *places]) is None
        ):
            version = subprocess.run([path, "-V"], capture_output=True, text=True).stdout.split()[1]
            if tuple(version.split(".")[:2]) == platform.python_version_tuple()[:2]:
                return path
    return None


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A directory that every user can write to, with a file that only its owner can read."""
    path = Path(mkdtemp(prefix="leeway-isolation-"))
    path.chmod(0o777)
    (path / "look.py").write_text(LOOK)
    (path / "private").write_text("hunter2")
    (path / "private").chmod(0o600)
    yield path
    subprocess.run(["rm", "-rf", str(path)], check=True)


def look(directory: Path, python: str, how: str, user: str | None = None) -> dict[str, Any]:
    """What reward code sees of an owner that runs as `user` and gets its URL by `how`."""
    environ = {name: value for name, value in os.environ.items() if "REDIS" not in name}
    given = {} if how == "-" else {"LEEWAY_REDIS_URL": "redis://:hunter2@host:1"}
    done = subprocess.run(
        [python, "-P", "-c", textwrap.dedent(OWNER), how],
        input="redis://:hunter2@host:1\n",
        capture_output=True,
        text=True,
        cwd=directory,
        env={**environ, **given, "PYTHONPATH": f"{SHARED}{os.pathsep}{SITE}"},
        timeout=120,
        user=user,
        group=None if user is None else pwd.getpwnam(user).pw_gid,
        extra_groups=None if user is None else [],
    )
    assert "value=1.0" in done.stdout, done.stdout + done.stderr
    seen: dict[str, Any] = json.loads((directory / "seen.json").read_text())
    print(json.dumps(seen))
    return seen


REFUSED = {"environ": "PermissionError", "mem": "PermissionError", "fd": "PermissionError"}


@pytest.mark.skipif(not landlock_version(), reason="this kernel has no Landlock")
@pytest.mark.parametrize("how", ["-", "env:LEEWAY_REDIS_URL"])
def test_reward_code_of_the_same_user(open_dir: Path, how: str) -> None:
    user, python = None, sys.executable
    if os.getuid() == 0:
        found = python_for("nobody")
        if found is None:
            pytest.skip("no Python that another user can read")
        user, python = "nobody", found
        os.chown(open_dir / "private", pwd.getpwnam(user).pw_uid, -1)
    seen = look(open_dir, python, how, user)
    assert {**seen, **REFUSED} == seen
    assert seen["own variables"] == [] and seen["own environment"] == "read" and seen["core"] == 0
    assert seen["signal"] == ("PermissionError" if landlock_version() >= SCOPES_SINCE else "sent")
    assert seen["private file"] == "SECRET", "documented: files of the same user are readable"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can change the user")
def test_reward_code_below_root_runs_as_somebody_else(open_dir: Path) -> None:
    python = python_for("nobody")
    if python is None:
        pytest.skip("no Python that another user can read")
    seen = look(open_dir, python, "-")
    assert {**seen, **REFUSED, "signal": "PermissionError", "private file": "PermissionError"} == seen
    assert seen["user"] == pwd.getpwnam("nobody").pw_uid
    assert seen["own environment"] == "read", "what it starts can be debugged"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can change the user")
def test_a_user_that_cannot_read_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir(mode=0o700)
    monkeypatch.setattr(sys, "path", [str(hidden)])
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    plan = plan_isolation(task_config(kind="digits"))
    assert plan.user is None and plan.why_not == f"user nobody cannot read {hidden}"
    with pytest.raises(TaskError, match=f"user nobody cannot read {hidden}, which reward code needs"):
        plan_isolation(task_config(kind="digits", reward_user="nobody"))
    with pytest.raises(TaskError, match="there is no user 'no-such-user'"):
        plan_isolation(task_config(kind="digits", reward_user="no-such-user"))
    assert plan_isolation(task_config(kind="digits", reward_user="root")).user is None
