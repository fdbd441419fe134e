"""The output directory: written like a checkpoint, and large enough."""

from __future__ import annotations

from pathlib import Path

import pytest
from preflight_support import config_of

from leeway_host.preflight.disk import existing_parent, judge_log, judge_space, size_of, try_checkpoint
from leeway_host.preflight.sizes import GIB, LOGS, MIB, ROW, disk_parts, total


def test_a_checkpoint_is_written_and_nothing_is_left(tmp_path: Path) -> None:
    found = try_checkpoint(tmp_path / "runs" / "new")
    assert found.level == "ok" and str(tmp_path) in found.text
    assert list(tmp_path.iterdir()) == []


def test_a_file_where_the_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    found = try_checkpoint(tmp_path / "out")
    assert found.level == "error" and "Not a directory" in found.text and "--out" in found.next_step


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    out = tmp_path / ("x" * 300)
    found = try_checkpoint(out)
    assert found.level == "error" and "File name too long" in found.text and str(out) in found.text
    assert existing_parent(out) == tmp_path and size_of(out) == 0


def test_a_link_to_nowhere(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("/nowhere/dir")
    found = try_checkpoint(tmp_path / "out")
    assert found.level == "error" and "a link to /nowhere/dir, which does not exist" in found.text


def test_names_with_spaces_and_line_breaks(tmp_path: Path) -> None:
    assert try_checkpoint(tmp_path / "a b\nü").level == "ok"


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a file system that nobody can write")
def test_a_file_system_that_cannot_be_written() -> None:
    found = try_checkpoint(Path("/proc/leeway/out"))
    assert found.level == "error" and "/proc" in found.text


def test_the_arithmetic() -> None:
    """float32: 12 bytes per parameter and checkpoint; the next one is written before the oldest goes."""
    config = config_of(
        trainer={"steps": 10, "checkpoint_every": 2, "keep_checkpoints": 2, "dtype": "float32"},
        output={"save_batches": [1, 3, 99]},
        weights={"dtype": "bfloat16"},
    )
    checkpoints, export, batches = 3 * 12, 4, 2 * 2 * 2
    assert total(disk_parts(config, 1000)) == 1000 * (checkpoints + export + batches) + LOGS + 10 * ROW
    once = config_of(trainer={"checkpoint_every": 0, "dtype": "bfloat16"}, output={"save_model": False})
    assert total(disk_parts(once, 1000)) == 14 * 1000 + LOGS + 20 * ROW


@pytest.mark.parametrize(
    ("free", "inodes", "present", "level"),
    [
        (100 * GIB, 10**6, 0, ["ok"]),
        (100 * GIB, None, 0, ["ok"]),
        (GIB, 10**6, 0, ["error"]),
        (GIB, 10**6, 5 * GIB, ["ok"]),
        (int(4.5 * GIB), 10**6, 0, ["warning"]),
        (100 * GIB, 500, 0, ["ok", "warning"]),
        (100 * GIB, 5, 0, ["ok", "error"]),
    ],
)
def test_space(tmp_path: Path, free: int, inodes: int | None, present: int, level: list[str]) -> None:
    """100 M parameters in bfloat16: two checkpoints of 1.3 GiB fit twice, and the third is temporary."""
    config = config_of(trainer={"steps": 30})
    found = judge_space(config, 100_000_000, free, inodes, present, tmp_path)
    assert [f.level for f in found] == level
    assert "3 checkpoints of 14 B x 100.0 M 3.9 GiB + the exported model 191 MiB" in found[0].text
    assert str(tmp_path) in found[0].text


def test_an_append_only_file(tmp_path: Path) -> None:
    config = config_of(redis={"appendonly": True})
    assert judge_log(config, 1_000_000, 10 * GIB, tmp_path).level == "ok"
    found = judge_log(config, 1_000_000_000, 10 * GIB, tmp_path)
    assert found.level == "warning" and "TMPDIR" in found.next_step


def test_the_size_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(bytes(MIB))
    assert size_of(tmp_path) == MIB
    assert size_of(tmp_path / "missing") == 0
