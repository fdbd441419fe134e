"""What the tests of the preflight share: a good machine, a small configuration, a small model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from leeway.config import RunConfig
from leeway.config.load import build_config
from leeway.findings import Finding
from leeway_host.preflight.cgroup import CgroupLimits
from leeway_host.preflight.machine import Machine
from leeway_host.preflight.site import ModelFacts, Site
from leeway_host.preflight.sizes import GIB

GOOD = Machine(
    shm_total=8 * GIB,
    shm_free=8 * GIB,
    shm_writable=True,
    tasks_limit=None,
    tasks_used=100,
    cores=8,
    memory_total=32 * GIB,
    memory_available=24 * GIB,
    cgroup=CgroupLimits(),
    wall_time=1.9e9,
    clock_drift_s=0.0,
    compiler="/usr/bin/g++",
    architecture="x86_64",
    cpu_flags=frozenset({"avx2", "avx512f", "avx512_bf16"}),
    accelerator=False,
)


def config_of(**sections: Any) -> RunConfig:
    """A configuration of the digits task; nested sections replace the defaults."""
    return build_config({"task": {"kind": "digits"}, **sections})


def facts(parameters: int = 1_000_000, directory: Path = Path("model"), **config: Any) -> ModelFacts:
    return ModelFacts(directory, parameters, 2 * parameters, {"vocab_size": 128, **config})


def site_of(out: Path, config: RunConfig | None = None, **environ: str) -> Site:
    return Site(config or config_of(), out, environ)


def levels(findings: Iterable[Finding]) -> set[str]:
    return {finding.level for finding in findings}


def text_of(findings: Iterable[Finding]) -> str:
    """All texts and next steps, for searching."""
    return "\n".join(f"{f.level} {f.check}: {f.text} -> {f.next_step}" for f in findings)


def edit_json(path: Path, **values: Any) -> None:
    """Change keys of a JSON file."""
    data = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**data, **values}))
