"""The machine: every limit that is too low is a finding with its number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from preflight_support import GOOD, config_of, levels, text_of

from leeway_host.preflight.cgroup import CgroupLimits, read_cgroup
from leeway_host.preflight.machine import Machine, judge_machine, judge_memory, read_machine
from leeway_host.preflight.sizes import GIB, MIB

PLANTED: dict[str, tuple[dict[str, Any], dict[str, Any], str, list[str]]] = {
    "no /dev/shm": ({"shm_total": None}, {}, "error", ["/dev/shm", "does not exist", "--shm-size"]),
    "/dev/shm read-only": ({"shm_writable": False}, {}, "error", ["/dev/shm", "not writable"]),
    "/dev/shm full": ({"shm_free": 4096}, {}, "error", ["/dev/shm", "0 MiB of 8.0 GiB free"]),
    "/dev/shm of a container": (
        {"shm_total": 64 * MIB, "shm_free": 64 * MIB},
        {"sampler": {"tensor_parallel_size": 2}},
        "warning",
        ["/dev/shm", "192 MiB needed"],
    ),
    "few threads": (
        {"tasks_limit": 120, "tasks_used": 100},
        {},
        "error",
        ["processes", "ulimit -u is 120"],
    ),
    "few threads in the group": (
        {"cgroup": CgroupLimits(tasks_limit=400, tasks_used=100)},
        {},
        "warning",
        ["processes", "pids.max of the control group is 400"],
    ),
    "a quota": (
        {"cgroup": CgroupLimits(cpus=2.0)},
        {},
        "warning",
        ["CPU", "2 of 8 cores", "sampler.cpu_threads"],
    ),
    "more processes than cores": (
        {"cores": 2},
        {"sampler": {"replicas": 4}},
        "warning",
        ["CPU", "5 trainer and sampler processes share 2 cores"],
    ),
    "a clock in the past": ({"wall_time": 1.0e8}, {}, "error", ["clock", "1973-03-03"]),
    "a clock that jumps": ({"clock_drift_s": 3.0}, {}, "warning", ["clock", "disagree"]),
    "a clock that goes backwards": ({"clock_drift_s": -1.0}, {}, "warning", ["clock", "disagree"]),
    "no compiler": ({"compiler": None}, {}, "warning", ["compiler", "g++"]),
    "no AVX2": ({"cpu_flags": frozenset({"sse4_2"})}, {}, "error", ["instruction set", "AVX2"]),
    "another architecture": ({"architecture": "riscv64"}, {}, "warning", ["instruction set", "riscv64"]),
    "bfloat16 is emulated": (
        {"cpu_flags": frozenset({"avx2"})},
        {},
        "info",
        ["instruction set", "avx512_bf16"],
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_problem_is_named(name: str) -> None:
    change, sections, level, parts = PLANTED[name]
    found = [f for f in judge_machine(replace(GOOD, **change), config_of(**sections)) if f.level != "ok"]
    assert [f.level for f in found] == [level], text_of(found)
    for part in parts:
        assert part in text_of(found)


@pytest.mark.parametrize("config", [None, config_of()])
def test_a_good_machine_has_no_problem(config: Any) -> None:
    assert levels(judge_machine(GOOD, config)) == {"ok"}


@pytest.mark.parametrize(
    "change", [{"cores": 1}, {"cpu_flags": frozenset()}, {"cgroup": CgroupLimits(cpus=1.0)}]
)
def test_an_accelerator_makes_the_cpu_unimportant(change: dict[str, Any]) -> None:
    assert levels(judge_machine(replace(GOOD, accelerator=True, **change), config_of())) == {"ok"}


def test_this_machine_can_be_read() -> None:
    machine = read_machine()
    assert machine.memory_total > machine.memory_available > 0
    assert machine.cores >= 1 and machine.tasks_used >= 1
    assert 0 <= machine.clock_drift_s < 5


@pytest.mark.parametrize(
    ("available", "limit", "level"),
    [(24, None, "ok"), (2, None, "warning"), (24, 2, "error"), (24, 5, "warning")],
)
def test_memory(available: int, limit: int | None, level: str) -> None:
    group = CgroupLimits(memory_limit=limit and limit * GIB, memory_used=GIB)
    machine: Machine = replace(GOOD, memory_available=available * GIB, cgroup=group)
    (found,) = judge_memory(machine, config_of(), 1_000_000)
    assert found.level == level, found.text
    assert "trainer 1.0 GiB" in found.text and "1 sampler 2.5 GiB" in found.text
    assert ("the control group" in found.text) == (limit is not None)


def test_memory_grows_with_the_model() -> None:
    """7 B parameters: 2 + 4 + 12 bytes for the trainer, 2 for the sampler, 2 x 2 for published copies."""
    (found,) = judge_memory(GOOD, config_of(), 7_000_000_000)
    assert found.level == "error" and "trainer 118.3 GiB" in found.text


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_limits_of_a_control_group_version_2(tmp_path: Path) -> None:
    root, member = tmp_path / "cgroup", tmp_path / "self"
    write(member, "0::/pod/box\n")
    write(root / "pod" / "box" / "memory.max", "max\n")
    write(root / "pod" / "memory.max", f"{4 * GIB}\n")
    write(root / "pod" / "memory.current", f"{GIB}\n")
    write(root / "pod" / "box" / "cpu.max", "150000 100000\n")
    write(root / "pod" / "cpu.max", "max 100000\n")
    write(root / "pod" / "box" / "pids.max", "512\n")
    write(root / "pod" / "box" / "pids.current", "12\n")
    assert read_cgroup(root, member) == CgroupLimits(4 * GIB, GIB, 1.5, 512, 12)


def test_limits_of_a_control_group_version_1(tmp_path: Path) -> None:
    root, member = tmp_path / "cgroup", tmp_path / "self"
    write(member, "4:memory:/box\n2:cpu,cpuacct:/box\n1:pids:/box\n0::/\n")
    write(root / "memory" / "memory.limit_in_bytes", f"{2**63 - 4096}\n")
    write(root / "memory" / "box" / "memory.limit_in_bytes", f"{2 * GIB}\n")
    write(root / "memory" / "box" / "memory.usage_in_bytes", f"{MIB}\n")
    write(root / "cpu" / "box" / "cpu.cfs_quota_us", "50000\n")
    write(root / "cpu" / "box" / "cpu.cfs_period_us", "100000\n")
    write(root / "pids" / "box" / "pids.max", "max\n")
    assert read_cgroup(root, member) == CgroupLimits(2 * GIB, MIB, 0.5, None, 0)


def test_no_control_group(tmp_path: Path) -> None:
    assert read_cgroup(tmp_path, tmp_path / "missing") == CgroupLimits()
