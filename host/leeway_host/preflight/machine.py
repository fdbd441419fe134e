"""The machine: shared memory, processes, cores, memory, clock, compiler, instruction set.

Directories, variables and open files are checked by `leeway_host.launch.environment`.

`read_machine` reads; the judges are pure functions of what it read and of the configuration (None: no run).
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from leeway.config import RunConfig
from leeway.findings import Finding, Level
from leeway_host.preflight.cgroup import CgroupLimits, read_cgroup
from leeway_host.preflight.site import Site
from leeway_host.preflight.sizes import MIB, memory_parts, show_parts, show_size, total

SHM = Path("/dev/shm")
SHM_MIN = 32 * MIB
SHM_PER_ENGINE = 160 * MIB
"""vLLM's queue between the processes of one engine (tensor_parallel_size > 1)."""
TASKS_PER_PROCESS = 150
OLDEST = 1_735_689_600
"""2025-01-01. An earlier clock was never set: certificates are not valid yet, names of runs repeat."""
CLOCK_SAMPLE_S = 0.05
ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dri", "/dev/accel")


@dataclass(frozen=True)
class Machine:
    """What the machine offers. Sizes in bytes; None: no limit, or unknown."""

    shm_total: int | None
    shm_free: int
    shm_writable: bool
    tasks_limit: int | None
    tasks_used: int
    cores: int
    memory_total: int
    memory_available: int
    cgroup: CgroupLimits
    wall_time: float
    clock_drift_s: float
    compiler: str | None
    architecture: str
    cpu_flags: frozenset[str]
    accelerator: bool


def read_machine() -> Machine:
    """Read /proc, /sys and the limits of this process; takes CLOCK_SAMPLE_S."""
    shm = os.statvfs(SHM) if SHM.is_dir() else None
    tasks, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    memory = psutil.virtual_memory()
    return Machine(
        shm_total=shm.f_blocks * shm.f_frsize if shm else None,
        shm_free=shm.f_bavail * shm.f_frsize if shm else 0,
        shm_writable=os.access(SHM, os.W_OK | os.X_OK),
        # The limit does not apply to root.
        tasks_limit=None if tasks == resource.RLIM_INFINITY or os.geteuid() == 0 else tasks,
        tasks_used=_tasks_of_user(os.getuid()),
        cores=len(os.sched_getaffinity(0)),
        memory_total=memory.total,
        memory_available=memory.available,
        cgroup=read_cgroup(),
        wall_time=time.time(),
        clock_drift_s=_clock_drift(),
        compiler=shutil.which("g++") or shutil.which("c++") or shutil.which("clang++"),
        architecture=platform.machine(),
        cpu_flags=_cpu_flags(),
        accelerator=any(Path(node).exists() for node in ACCELERATORS),
    )


def _tasks_of_user(user: int) -> int:
    count = 0
    for process in psutil.process_iter():
        try:
            if process.uids().real == user:
                count += process.num_threads()
        except psutil.Error:
            continue  # it has ended in the meantime
    return count


def _clock_drift() -> float:
    """Difference between the monotonic and the wall clock over a moment; negative: one went backwards."""
    wall, mono = time.time(), time.monotonic()
    time.sleep(CLOCK_SAMPLE_S)
    wall_s, mono_s = time.time() - wall, time.monotonic() - mono
    return -1.0 if min(wall_s, mono_s) <= 0 else abs(wall_s - mono_s)


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    first = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return frozenset(first.partition(":")[2].split())


def process_count(config: RunConfig | None) -> int:
    """Processes of a run that compute: controller, ranks, samplers."""
    return 3 if config is None else 1 + config.trainer.ranks + config.sampler.replicas


def check_machine_limits(site: Site) -> list[Finding]:
    return judge_machine(read_machine(), site.config)


def judge_machine(machine: Machine, config: RunConfig | None) -> list[Finding]:
    """Everything except memory, for which the size of the model is needed."""
    return [
        *judge_shm(machine, config),
        *judge_tasks(machine, config),
        *judge_cores(machine, config),
        *judge_clock(machine),
        *judge_compiler(machine),
        *judge_cpu(machine, config),
    ]


def judge_shm(machine: Machine, config: RunConfig | None) -> list[Finding]:
    """/dev/shm holds semaphores of multiprocessing and the queues of vLLM's and NCCL's processes."""
    check, fix = "/dev/shm", "enlarge it: docker run --shm-size=1g; in a pod, a memory volume at /dev/shm"
    if machine.shm_total is None or not machine.shm_writable:
        state = "does not exist" if machine.shm_total is None else "is not writable"
        return [Finding("error", check, f"/dev/shm {state}; worker processes cannot be started", fix)]
    engines = config.sampler.replicas if config and config.sampler.tensor_parallel_size > 1 else 0
    ranks = config.trainer.ranks if config and machine.accelerator and config.trainer.ranks > 1 else 0
    need = SHM_MIN + engines * SHM_PER_ENGINE + ranks * SHM_MIN
    text = f"{show_size(machine.shm_free)} of {show_size(machine.shm_total)} free, {show_size(need)} needed"
    level: Level = "ok" if machine.shm_free >= need else "error" if machine.shm_free < MIB else "warning"
    return [Finding(level, check, text, "" if level == "ok" else fix)]


def judge_tasks(machine: Machine, config: RunConfig | None) -> list[Finding]:
    """Processes and threads against the user's limit and the cgroup's."""
    check, need = "processes", process_count(config) * TASKS_PER_PROCESS
    limits = {"ulimit -u": (machine.tasks_limit, machine.tasks_used)}
    limits["pids.max of the control group"] = (machine.cgroup.tasks_limit, machine.cgroup.tasks_used)
    found = []
    for name, (limit, used) in limits.items():
        if limit is not None and limit - used < need:
            text = f"{name} is {limit}, {used} are in use; the run starts up to {need} threads"
            level: Level = "error" if limit - used < need / 4 else "warning"
            found.append(Finding(level, check, text, f"raise {name}"))
    return found or [Finding("ok", check, f"room for the run's {need} threads")]


def judge_cores(machine: Machine, config: RunConfig | None) -> list[Finding]:
    check, cores = "CPU", float(machine.cores)
    quota, processes = machine.cgroup.cpus, process_count(config) - 1  # the controller hardly computes
    if quota is not None and quota < cores:
        threads = max(1, int(quota) // processes)
        text = f"the control group allows {quota:g} of {machine.cores} cores; threads are counted by cores"
        step = f"set sampler.cpu_threads and trainer.cpu_threads to {threads}"
        given = config and config.sampler.cpu_threads and config.trainer.cpu_threads
        if config is not None and not given and not machine.accelerator:
            return [Finding("warning", check, text, step)]
        cores = quota
    if config is not None and processes > cores and not machine.accelerator:
        text = f"{processes} trainer and sampler processes share {cores:g} cores"
        step = "lower sampler.replicas or trainer.ranks: more processes than cores only slow each other down"
        return [Finding("warning", check, text, step)]
    return [Finding("ok", check, f"{cores:g} cores")]


def judge_clock(machine: Machine) -> list[Finding]:
    if machine.wall_time < OLDEST:
        shown = time.strftime("%Y-%m-%d", time.gmtime(machine.wall_time))
        text = f"the clock says {shown}; TLS certificates would be rejected, and ages would be wrong"
        return [Finding("error", "clock", text, "set the clock (NTP)")]
    if machine.clock_drift_s < 0 or machine.clock_drift_s > CLOCK_SAMPLE_S:
        text = "wall clock and monotonic clock disagree: the clock is being set, or the machine was paused"
        return [Finding("warning", "clock", text, "repeat when the clock is in step (NTP)")]
    return [Finding("ok", "clock", "wall clock and monotonic clock agree")]


def judge_compiler(machine: Machine) -> list[Finding]:
    if machine.compiler is None:
        text = "no C++ compiler (g++, c++, clang++) on PATH; DeepSpeed, Triton and torch.compile need one"
        return [Finding("warning", "compiler", text, "install g++")]
    return [Finding("ok", "compiler", machine.compiler)]


def judge_cpu(machine: Machine, config: RunConfig | None) -> list[Finding]:
    """The instruction sets that vLLM's CPU build needs."""
    check = "instruction set"
    if machine.accelerator:
        return [Finding("ok", check, "an accelerator is present; the CPU engine is not used")]
    flags, x86 = machine.cpu_flags, machine.architecture in ("x86_64", "AMD64")
    if x86 and flags and "avx2" not in flags:
        text = "neither AVX2 nor an accelerator: vLLM's CPU engine ends with an illegal instruction"
        return [Finding("error", check, text, "use a machine with AVX2 (x86-64-v3) or a GPU")]
    if not x86 and machine.architecture not in ("aarch64", "arm64"):
        text = f"architecture {machine.architecture}: Leeway is tested on x86-64 and aarch64 only"
        return [Finding("warning", check, text, "use leeway doctor CONFIG --engine to try the engine")]
    slow = x86 and flags and "avx512_bf16" not in flags
    if config is not None and config.sampler.dtype == "bfloat16" and slow:
        text = "the CPU has no bfloat16 arithmetic (avx512_bf16): sampler.dtype=bfloat16 is emulated"
        return [Finding("info", check, text, "sampler.dtype=float32 may be faster")]
    best = next((name for name in ("avx512f", "avx2", "asimd") if name in flags), machine.architecture)
    return [Finding("ok", check, best)]


def check_memory(site: Site) -> list[Finding]:
    assert site.model is not None
    return judge_memory(read_machine(), site.config, site.model.parameters)


def judge_memory(machine: Machine, config: RunConfig, parameters: int) -> list[Finding]:
    """The run's memory against what is available here, and below the control group's limit."""
    check = "memory"
    parts = memory_parts(config, parameters, accelerator=machine.accelerator)
    need, available, limit = total(parts), machine.memory_available, machine.memory_total
    where = "this machine"
    group = machine.cgroup
    if group.memory_limit is not None and group.memory_limit - group.memory_used < available:
        available, limit = group.memory_limit - group.memory_used, group.memory_limit
        where = "the control group"
    text = f"about {show_parts(parts)}; {show_size(available)} of {show_size(limit)} available in {where}"
    if need <= available:
        return [Finding("ok", check, text)]
    step = "lower sampler.replicas, sampler.cpu_kv_cache_gib or trainer.ranks, or use a smaller model"
    # Estimates are not exact; only what is far beyond the machine's size is certain to fail.
    return [Finding("error" if need > 1.5 * limit else "warning", check, text, step)]
