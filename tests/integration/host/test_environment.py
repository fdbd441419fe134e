"""Environments as containers and batch systems have them: a run works there, or says what to set (exit 2).

The real command, with stand-ins for the services.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

LAUNCHER = Path(__file__).parent / "launcher.py"


@dataclass(frozen=True)
class Case:
    """Variables that differ (None: unset; {tmp}: the test's directory), limits, and what comes of it."""

    environ: dict[str, str | None] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    """Words of the refusal; empty: it works."""
    prepare: Callable[[Path], None] = lambda tmp: None
    before: Callable[[], None] = lambda: None
    slow: bool = False
    """Much like a case that is not."""
    nameless: bool = False
    """As a user id without an entry in /etc/passwd, as OpenShift assigns them."""


def file_limit(soft: int, hard: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def umask(mask: int) -> Callable[[], None]:
    return lambda: void(os.umask(mask))


def void(_: object) -> None:
    return


LONG = "x" * 90
NO_HOME: dict[str, str | None] = {"HOME": None, "XDG_CACHE_HOME": None, "LEEWAY_CACHE_DIR": None}
CASES: dict[str, Case] = {
    "as it is": Case(),
    "no home and no name": Case(NO_HOME, ("LEEWAY_CACHE_DIR", "HOME is not set"), nameless=True),
    "no home, but a cache": Case({**NO_HOME, "LEEWAY_CACHE_DIR": "{tmp}/cache"}, nameless=True),
    "a home that cannot be written": Case({**NO_HOME, "HOME": "/proc"}, ("LEEWAY_CACHE_DIR", "/proc/.cache")),
    "such a home, but a cache": Case(
        {**NO_HOME, "HOME": "/proc", "LEEWAY_CACHE_DIR": "{tmp}/cache"}, slow=True
    ),
    "XDG_CACHE_HOME that cannot be written": Case(
        {"LEEWAY_CACHE_DIR": None, "XDG_CACHE_HOME": "/proc/x"}, ("LEEWAY_CACHE_DIR", "/proc/x")
    ),
    "LEEWAY_CACHE_DIR that cannot be written": Case(
        {"LEEWAY_CACHE_DIR": "/proc/x"}, ("LEEWAY_CACHE_DIR", "/proc/x")
    ),
    "TMPDIR that is missing": Case({"TMPDIR": "{tmp}/missing"}, ("TMPDIR", "missing is not a directory")),
    "TMPDIR that cannot be written": Case({"TMPDIR": "/proc"}, ("TMPDIR", "/proc:")),
    "TMPDIR that is too long": Case(
        {"TMPDIR": f"{{tmp}}/{LONG}"},
        ("TMPDIR", "sockets", "107"),
        prepare=lambda tmp: (tmp / LONG).mkdir(),
    ),
    "LANG=C": Case({"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    "a Latin-1 terminal": Case({"PYTHONIOENCODING": "latin-1"}, slow=True),
    "umask 077": Case(before=umask(0o077)),
    "umask 000": Case(before=umask(0), slow=True),
    "umask 777": Case(names=("umask", "0777"), before=umask(0o777)),
    "256 open files, more allowed": Case(before=file_limit(256, 4096), slow=True),
    "256 open files": Case(before=file_limit(256, 256)),
    "64 open files": Case(names=("ulimit -n", "64"), before=file_limit(64, 64)),
    "proxies": Case({"http_proxy": "http://127.0.0.1:1", "HTTPS_PROXY": "http://127.0.0.1:1"}, slow=True),
}


NAMELESS = ["unshare", "--user", "--map-user=54321"]
"""The files of this user belong to user 54321 in a namespace of its own, where that user has no name."""


@pytest.fixture(scope="module")
def namespaces() -> bool:
    """True when this machine allows user namespaces."""
    return (
        shutil.which("unshare") is not None
        and subprocess.run([*NAMELESS, "true"], check=False).returncode == 0
    )


def start(case: Case, tmp: Path, *args: str) -> subprocess.CompletedProcess[str]:
    environ = dict(os.environ)
    for name, value in case.environ.items():
        environ.pop(name, None)
        if value is not None:
            environ[name] = value.replace("{tmp}", str(tmp))
    return subprocess.run(
        [*(NAMELESS if case.nameless else []), sys.executable, str(LAUNCHER), *args],
        env=environ,
        cwd=tmp,
        preexec_fn=case.before,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if case.slow else n for n, case in CASES.items()]
)
def test_a_run_works_or_says_what_to_set(name: str, tmp_path: Path, namespaces: bool) -> None:
    case = CASES[name]
    if case.nameless and not namespaces:
        pytest.skip("this machine allows no user namespaces")
    case.prepare(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    config = tmp_path / "run.yaml"
    config.write_text("task: {kind: digits}\ntrainer: {steps: 1}\n")
    (out / "orders.json").write_text(json.dumps({"steps": 1, "step_s": 0.1}))
    if case.names:
        done = start(case, tmp_path, "run", str(config), "--out", str(out))
        assert done.returncode == 2, done.stderr
        for word in case.names:
            assert word in done.stderr
        assert "Traceback" not in done.stderr
        return
    for args in (["--help"], ["config", "show", str(config)]) if case.environ or case.nameless else ():
        done = start(case, tmp_path, *args)
        assert done.returncode == 0, done.stderr
    done = start(case, tmp_path, "run", str(config), "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert json.loads((out / "summary.json").read_text())["status"] == "completed"
    assert not list(tmp_path.glob("~*"))  # a library's idea of a home directory


def test_a_read_only_working_directory(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("task: {kind: digits}\n")
    argv = [sys.executable, str(LAUNCHER), "run", str(config)]
    done = subprocess.run(argv, cwd="/proc", capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "runs/" in done.stderr and "--out DIR" in done.stderr


def test_a_deleted_working_directory(tmp_path: Path) -> None:
    config, gone = tmp_path / "run.yaml", tmp_path / "gone"
    config.write_text("task: {kind: digits}\n")
    gone.mkdir()
    argv = [sys.executable, str(LAUNCHER), "run", str(config), "--out", str(tmp_path / "out")]
    shell = ["sh", "-c", f'rmdir {gone}; exec "$@"', "sh", *argv]
    done = subprocess.run(shell, cwd=gone, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert "working directory: it has been deleted" in done.stderr
