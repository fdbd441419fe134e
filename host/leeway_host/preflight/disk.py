"""The output directory: a checkpoint is written and read as the trainer does it, and there is room."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import tempfile
from pathlib import Path

from leeway.config import RunConfig
from leeway.findings import Finding, Level
from leeway_host.preflight.site import Site
from leeway_host.preflight.sizes import MIB, disk_parts, redis_bytes, show_parts, show_size, total

WRITE, SPACE = "checkpoint", "disk"
PROBE_BYTES = 4 * MIB
FILES_NEEDED = 1000
"""Inodes for checkpoints, logs and saved batches, generously."""


def check_writing(site: Site) -> list[Finding]:
    return [try_checkpoint(site.out)]


def try_checkpoint(out: Path) -> Finding:
    """Write files, fsync, rename and read them back below `out`; nothing is left, also no directory."""
    root = existing_parent(out)
    probe: Path | None = None
    try:
        if not out.exists() and out.is_symlink():  # raises for a name that is too long
            raise FileNotFoundError(errno.ENOENT, f"it is a link to {out.readlink()}, which does not exist")
        # Not below `out` itself if it does not exist: a preflight alone leaves no directory behind.
        probe = Path(tempfile.mkdtemp(prefix=".leeway-preflight-", dir=root))
        temporary, final = probe / ".step-000001.tmp", probe / "step-000001"
        content = secrets.token_bytes(PROBE_BYTES)
        (temporary / "deepspeed").mkdir(parents=True)
        for path in (temporary / "deepspeed" / "states.pt", temporary / "leeway.json"):
            path.write_bytes(content)
            _fsync(path)
        _fsync(temporary)
        temporary.rename(final)
        (probe / "latest.tmp").write_text("step-000001\n")
        (probe / "latest.tmp").replace(probe / "latest")
        _fsync(probe)
        if (final / "deepspeed" / "states.pt").read_bytes() != content:
            return Finding(
                "error", WRITE, f"{root}: what was written is not what is read back", "use another disk"
            )
    except OSError as exc:
        what = exc.strerror or str(exc)
        where = "" if root == out else f" for {out}"
        return Finding(
            "error",
            WRITE,
            f"a checkpoint cannot be written in {root}{where}: {what}",
            "choose another --out (output.dir)",
        )
    finally:
        if probe is not None:
            shutil.rmtree(probe, ignore_errors=True)
    return Finding("ok", WRITE, f"written, synced, renamed and read back in {root}")


def existing_parent(path: Path) -> Path:
    """`path`, or the nearest directory above it that exists."""
    path = path.absolute()
    while not _exists(path) and path != path.parent:
        path = path.parent
    return path


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long
        return False


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_space(site: Site) -> list[Finding]:
    assert site.model is not None
    root = existing_parent(site.out)
    stat = os.statvfs(root)
    inodes = stat.f_favail if stat.f_files else None  # some file systems do not count them
    found = judge_space(
        site.config, site.model.parameters, stat.f_bavail * stat.f_frsize, inodes, size_of(site.out), root
    )
    if site.config.redis.url is None and site.config.redis.appendonly:
        temporary = Path(tempfile.gettempdir())
        found.append(
            judge_log(site.config, site.model.parameters, shutil.disk_usage(temporary).free, temporary)
        )
    return found


def judge_space(
    config: RunConfig, parameters: int, free: int, inodes: int | None, present: int, root: Path
) -> list[Finding]:
    """Free space against what the run will write; `present` bytes of it are there already (a resumed run)."""
    parts = disk_parts(config, parameters)
    need = max(0.0, total(parts) - present)
    there = f", of which {show_size(present)} are there" if present > MIB else ""
    text = f"{show_parts(parts)}{there}; {show_size(free)} free in {root}"
    level: Level = "error" if free < need else "warning" if free < 1.2 * need else "ok"
    step = "lower trainer.keep_checkpoints, raise trainer.checkpoint_every, or choose another --out"
    found = [Finding(level, SPACE, text, "" if level == "ok" else step)]
    if inodes is not None and inodes < FILES_NEEDED:
        text = f"{inodes} free inodes in {root}, about {FILES_NEEDED} needed"
        found.append(Finding("error" if inodes < 100 else "warning", SPACE, text, "delete files there"))
    return found


def judge_log(config: RunConfig, parameters: int, free: int, directory: Path) -> Finding:
    """The append-only file of the run's own server, which is rewritten when it has doubled."""
    need = 3 * redis_bytes(config, parameters)
    text = f"redis.appendonly: up to {show_size(need)} in {directory}, {show_size(free)} free"
    if free >= need:
        return Finding("ok", SPACE, text)
    return Finding("warning", SPACE, text, "set TMPDIR to a larger disk, or redis.appendonly=false")


def size_of(directory: Path) -> int:
    """Bytes of the files in `directory`; 0 if it does not exist."""
    found = 0
    for root, _, names in os.walk(directory):
        for path in (Path(root, name) for name in names):
            try:
                found += path.stat().st_size if path.is_file() and not path.is_symlink() else 0
            except OSError:
                continue  # it has been deleted in the meantime
    return found
