"""Limits of the control group that this process is in, versions 1 and 2."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60
"""Version 1 writes a number near 2**63 where there is no limit."""


@dataclass(frozen=True)
class CgroupLimits:
    """None: no limit. `cpus`: cores that may be used on average."""

    memory_limit: int | None = None
    memory_used: int = 0
    cpus: float | None = None
    tasks_limit: int | None = None
    tasks_used: int = 0


def read_cgroup(root: Path = ROOT, membership: Path = Path("/proc/self/cgroup")) -> CgroupLimits:
    """The tightest limits on the way from this process's group to the root."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return CgroupLimits()
    groups = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))
    memory = _first(
        _tightest(root, groups.get(""), "memory.max", "memory.current"),
        _tightest(root / "memory", groups.get("memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
    )
    tasks = _first(
        _tightest(root, groups.get(""), "pids.max", "pids.current"),
        _tightest(root / "pids", groups.get("pids"), "pids.max", "pids.current"),
    )
    return CgroupLimits(*memory, _cpus(root, groups), *tasks)


Limit = tuple[int | None, int]


def _first(*found: Limit) -> Limit:
    return next((pair for pair in found if pair[0] is not None), (None, 0))


def _levels(base: Path, path: str | None) -> list[Path]:
    """The directories from the group to the root. In a container the own group may be mounted as the root."""
    if path is None or not base.is_dir():
        return []
    full = base / path.strip("/")
    return [full, *(parent for parent in full.parents if parent == base or base in parent.parents)]


def _tightest(base: Path, path: str | None, limit_file: str, used_file: str) -> Limit:
    best: Limit = (None, 0)
    for directory in _levels(base, path):
        limit, used = _number(directory / limit_file), _number(directory / used_file) or 0
        if limit is not None and (best[0] is None or limit - used < best[0] - best[1]):
            best = (limit, used)
    return best


def _cpus(root: Path, groups: dict[str, str]) -> float | None:
    found = []
    for directory in _levels(root, groups.get("")):
        words = _words(directory / "cpu.max")
        if len(words) == 2 and words[0].isdecimal():
            found.append(int(words[0]) / int(words[1]))
    for directory in _levels(root / "cpu", groups.get("cpu")):
        quota, period = _number(directory / "cpu.cfs_quota_us"), _number(directory / "cpu.cfs_period_us")
        if quota is not None and period:
            found.append(quota / period)
    return min(found, default=None)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    words = _words(path)
    if len(words) == 1 and words[0].isdecimal() and int(words[0]) < UNLIMITED:
        return int(words[0])
    return None
