"""Checkpoint directories: what is kept, what is damaged, and what a resume reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from leeway.checkpoints.damage import check_whole, find_damage, record_files
from leeway.checkpoints.find import find_checkpoint, read_latest, roll_back
from leeway.checkpoints.retention import next_written, prune
from leeway.checkpoints.state import (
    LATEST,
    STATE_FILE,
    CheckpointError,
    TrainState,
    checkpoint_name,
    has_checkpoint,
    list_checkpoints,
)
from leeway.errors import UsageError

TENSORS = "deepspeed/mp_rank_00_model_states.pt"


def write(directory: Path, step: int, *, epoch: int = 0, latest: bool = True) -> Path:
    """A checkpoint as the trainer leaves it, with made-up contents."""
    path = directory / checkpoint_name(step)
    (path / "deepspeed").mkdir(parents=True)
    (path / TENSORS).write_bytes(b"weights %d " % step * 100)
    state = TrainState(
        next_batch=step,
        version=1,
        published_at=0,
        epoch=epoch,
        ranks=1,
        zero_stage=0,
        dtype="float32",
        model="m",
        written=next_written(directory),
        files=record_files(path),
    )
    (path / STATE_FILE).write_text(state.model_dump_json())
    if latest:
        (directory / LATEST).write_text(f"{path.name}\n")
    return path


def steps(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in directory.glob("step-*"))


@pytest.mark.parametrize(
    ("written", "keep", "left"),
    [
        ([10, 20, 30], 2, [20, 30]),
        ([30, 40, 10], 2, [10, 40]),  # rolled back, or started over in the same directory
        ([30, 40, 10, 20], 2, [10, 20]),
        ([30, 40, 10], 1, [10]),
        ([999_999, 1_000_000], 1, [1_000_000]),
        ([1_000_000, 999_999], 1, [999_999]),
        ([999_998, 999_999, 1_000_000, 1_000_001], 3, [999_999, 1_000_000, 1_000_001]),
        ([5], 3, [5]),
    ],
)
def test_the_checkpoints_written_last_are_kept(
    tmp_path: Path, written: list[int], keep: int, left: list[int]
) -> None:
    for step in written:
        write(tmp_path, step)
    prune(tmp_path, keep)
    assert steps(tmp_path) == left
    assert find_checkpoint(tmp_path).name == checkpoint_name(written[-1])


def test_what_the_pointer_names_is_never_deleted(tmp_path: Path) -> None:
    for number in (30, 40):  # of another version, or foreign: no state at all
        (tmp_path / f"step-{number:06d}").mkdir()
    (tmp_path / "step-000010").mkdir()
    (tmp_path / LATEST).write_text("step-000010\n")
    prune(tmp_path, keep=2)
    assert steps(tmp_path) == [10]


def test_checkpoints_of_earlier_versions_are_sorted_by_epoch_and_step(tmp_path: Path) -> None:
    for step, epoch in ((40, 1), (20, 2), (30, 2)):
        path = write(tmp_path, step, epoch=epoch)
        state = json.loads((path / STATE_FILE).read_text())
        (path / STATE_FILE).write_text(
            json.dumps({k: state[k] for k in state if k not in ("written", "files")})
        )
    assert [found.state.next_batch for found in list_checkpoints(tmp_path) if found.state] == [40, 20, 30]
    prune(tmp_path, keep=2)
    assert steps(tmp_path) == [20, 30]


def test_damaged_and_unfinished_ones_take_no_place_of_a_whole_one(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    (tmp_path / "step-000002" / TENSORS).unlink()
    for name in (".step-000004.tmp", ".step-000001.old"):
        (tmp_path / name / "deepspeed").mkdir(parents=True)
    (tmp_path / "model-files").mkdir()
    (tmp_path / "step-notes.txt").write_text("mine")
    prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "model-files",
        "step-000001",
        "step-000003",
        "step-notes.txt",
    ]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"\0")


def empty(path: Path) -> None:
    path.write_text("")


def put(path: Path, contents: bytes) -> None:
    path.write_bytes(contents)


DAMAGE: list[tuple[str, Callable[[Path], None], str]] = [
    (TENSORS, cut, rf"{TENSORS} has 997 bytes, expected 1000"),
    (TENSORS, Path.unlink, rf"{TENSORS} is missing"),
    (TENSORS, empty, rf"{TENSORS} has 0 bytes"),
    (TENSORS, flip, rf"the contents of {TENSORS} differ"),
    (STATE_FILE, empty, r"leeway\.json cannot be read: Invalid JSON: EOF"),
    (STATE_FILE, cut, r"leeway\.json cannot be read: Invalid JSON"),
    (
        STATE_FILE,
        lambda p: p.write_text("{}") and None,
        r"leeway\.json cannot be read: next_batch: Field req",
    ),
    (STATE_FILE, lambda p: p.write_text("[]") and None, r"leeway\.json cannot be read"),
    (STATE_FILE, lambda p: p.write_bytes(b"\xff\xfe") and None, r"leeway\.json cannot be read"),
    (STATE_FILE, Path.unlink, r"leeway\.json cannot be read: No such file"),
]


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGE)
def test_damage_is_named_with_the_way_out(
    tmp_path: Path, name: str, damage: Callable[[Path], None], words: str
) -> None:
    checkpoints = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        write(checkpoints, step)
    bad = checkpoints / "step-000003"
    damage(bad / name)
    with pytest.raises(CheckpointError, match=words) as caught:
        check_whole(find_checkpoint(tmp_path), contents=True)
    assert f"checkpoint {bad} is damaged" in str(caught.value)
    assert f"leeway run --resume {tmp_path} --resume-from 2" in str(caught.value)

    assert roll_back(tmp_path, 2).name == "step-000002"
    found = read_latest(tmp_path)
    assert found is not None
    assert found.next_batch == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "latest is empty"),
        ("step-000009\n", "step-000009 is damaged: the directory does not exist"),
        ("../../etc", r"latest contains '\.\./\.\./etc', expected the name of a checkpoint"),
        ("\x00\x00", "expected the name of a checkpoint"),
    ],
)
def test_a_damaged_pointer_is_named_with_the_way_out(tmp_path: Path, text: str, words: str) -> None:
    checkpoints = tmp_path / "checkpoints"
    write(checkpoints, 4)
    (checkpoints / LATEST).write_text(text)
    with pytest.raises(CheckpointError, match=words) as caught:
        find_checkpoint(tmp_path)
    assert f"leeway run --resume {tmp_path} --resume-from 4" in str(caught.value)


def test_no_whole_checkpoint_is_left(tmp_path: Path) -> None:
    cut(write(tmp_path / "checkpoints", 4) / TENSORS)
    with pytest.raises(CheckpointError, match="contains no whole checkpoint: start over"):
        find_checkpoint(tmp_path)


def test_a_lost_pointer_means_the_checkpoint_written_last(tmp_path: Path) -> None:
    for step in (30, 10):
        write(tmp_path / "checkpoints", step, latest=False)
    assert has_checkpoint(tmp_path)
    assert find_checkpoint(tmp_path).name == "step-000010"


def test_a_step_is_chosen_by_its_number(tmp_path: Path) -> None:
    assert not has_checkpoint(tmp_path)
    assert read_latest(tmp_path) is None
    with pytest.raises(UsageError, match="no checkpoint in"):
        find_checkpoint(tmp_path)
    for step in (3, 1_000_000):
        write(tmp_path / "checkpoints", step)
    assert find_checkpoint(tmp_path, 1_000_000).name == "step-1000000"
    assert find_checkpoint(tmp_path / "checkpoints" / "step-000003").name == "step-000003"
    with pytest.raises(UsageError, match=r"no checkpoint of step 4; there are: 3, 1000000"):
        find_checkpoint(tmp_path, 4)


def test_a_whole_checkpoint_has_no_damage(tmp_path: Path) -> None:
    assert find_damage(write(tmp_path, 3), contents=True) is None
