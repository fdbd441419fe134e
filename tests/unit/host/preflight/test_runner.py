"""All checks of a configuration: a hang and a bug are findings, nothing is hidden, the examples are fine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from preflight_support import GOOD, config_of, facts, levels, site_of, text_of

from leeway.config.load import load_config
from leeway.errors import EXIT_USAGE, UsageError
from leeway.findings import Finding, order_findings
from leeway_host.launch.local import LocalRun
from leeway_host.models import prepare_model
from leeway_host.preflight import as_json, describe, exit_code, require_ready, run_preflight
from leeway_host.preflight.disk import judge_space
from leeway_host.preflight.machine import judge_machine, judge_memory
from leeway_host.preflight.ports import check_ports
from leeway_host.preflight.runner import Check, PreflightFailed, check_file, run_checks
from leeway_host.preflight.server import check_server_memory
from leeway_host.preflight.settings import check_settings
from leeway_host.preflight.sizes import GIB

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[4]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
SIZES = {"0.6b": 596_000_000, "1.7b": 1_720_000_000, "tiny": 430_000}
SMALL_TINY = {"name": "tiny", "max_length": 64, "params": {"hidden": 32, "layers": 1, "warmup_steps": 0}}


def test_a_check_that_hangs_and_one_with_a_bug(tmp_path: Path) -> None:
    release = threading.Event()

    def hang(_: Any) -> list[Finding]:
        release.wait(60)
        return []

    def bug(_: Any) -> list[Finding]:
        raise KeyError("key")

    def rejected(_: Any) -> list[Finding]:
        raise UsageError("cannot be used")

    checks = [
        Check("slow", hang, 0.5),
        Check("bug", bug),
        Check("rejected", rejected),
        Check("good", lambda _: [Finding("ok", "good", "fine")]),
    ]
    started = time.monotonic()
    found = run_checks(checks, site_of(tmp_path))
    release.set()
    assert time.monotonic() - started < 10
    assert [(f.check, f.level) for f in found] == [
        ("slow", "error"),
        ("bug", "warning"),
        ("rejected", "error"),
        ("good", "ok"),
    ]
    assert "no result within 0.5 s" in text_of(found) and "KeyError" in text_of(found)


def test_the_report() -> None:
    findings = [
        Finding("ok", "a", "fine"),
        Finding("error", "b", "broken", "mend it"),
        Finding("warning", "c", "odd"),
        Finding("error", "d", "[bold]broken too"),
    ]
    assert [f.check for f in order_findings(findings)] == ["b", "d", "c", "a"]
    text = describe(findings).plain
    assert text.splitlines() == [
        "error    b: broken",
        "         -> mend it",
        "error    d: [bold]broken too",
        "warning  c: odd",
        "ok       a: fine",
        "2 errors, 1 warning, 1 ok",
    ]
    assert as_json(findings)["status"] == "error" and exit_code(findings) == EXIT_USAGE
    assert exit_code(findings[:1] + findings[2:3]) == 0


@pytest.fixture
def planted(tmp_path: Path) -> Any:
    """A configuration with a problem of several kinds, written to a file."""
    (tmp_path / "own.py").write_text("def score(response, answer, metadata): raise ValueError('my bug')\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        data = {
            "task": {"kind": "digits", "reward": "own:score"},
            "model": {**SMALL_TINY, "max_length": 24},
            "sampler": {"http_port": taken.getsockname()[1]},
            "redis": {"maxmemory_mib": 64, "url": "redis://127.0.0.1:1/0"},
            "output": {"save_batches": [99]},
            "sampling": {"max_new_tokens": 20},
        }
        path = tmp_path / "run.yaml"
        path.write_text(json.dumps(data))
        yield path


EXPECTED = [
    ("error", "ports", "sampler.http_port"),
    ("error", "redis", "redis.url"),
    ("error", "reward", "ValueError: my bug"),
    ("error", "prompts", "model.max_length=24"),
    ("warning", "configuration", "output.save_batches"),
]


def leeway(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "LEEWAY_CACHE_DIR": str(cwd / "cache")}
    command = [sys.executable, "-m", "leeway_host", *args]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=380, check=False)


@pytest.mark.slow  # much like the next
def test_doctor_lists_all_problems_at_once(planted: Path) -> None:
    done = leeway("doctor", str(planted), "--json", cwd=planted.parent)
    assert done.returncode == EXIT_USAGE, done.stderr
    found = json.loads(done.stdout)["findings"]
    for level, check, part in EXPECTED:
        assert any((f["level"], f["check"]) == (level, check) and part in f["text"] for f in found), (
            f"{check} is missing in {done.stdout}"
        )
    assert not (planted.parent / "runs").exists()


def test_run_starts_nothing_and_lists_all_errors(planted: Path) -> None:
    out = planted.parent / "out"
    done = leeway("run", str(planted), "--out", str(out), cwd=planted.parent)
    assert done.returncode == EXIT_USAGE, done.stderr
    for level, check, part in EXPECTED:
        assert check in done.stderr and part in done.stderr
        assert level == "warning" or part in json.loads((out / "summary.json").read_text())["error"]
    assert not (out / "logs").exists()
    again = leeway("run", str(planted), "--out", str(out), "--no-preflight", cwd=planted.parent)
    assert again.returncode == EXIT_USAGE
    assert "preflight" not in again.stderr and "sampler.http_port" in again.stderr


def test_doctor_of_a_configuration_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("task: {kind: digits}\ntrainer: {step: 3}\nsync: {max_age: -1}\n")
    found = check_file(path, [], engine=False, progress=lambda _: None)
    errors = [f for f in found if f.level == "error"]
    assert [f.check for f in errors] == ["configuration"] * 2
    assert "trainer.step: unknown key" in text_of(errors) and "sync.max_age" in text_of(errors)
    assert "clock" in {f.check for f in found}


def test_doctor_of_this_machine(tmp_path: Path) -> None:
    done = leeway("doctor", "--machine", "--json", cwd=tmp_path)
    found = json.loads(done.stdout)["findings"]
    assert {"/dev/shm", "environment", "processes", "CPU", "clock", "compiler"} <= {f["check"] for f in found}
    assert done.returncode == (EXIT_USAGE if "error" in {f["level"] for f in found} else 0)


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ([], "leeway doctor examples/quickstart.yaml"),
        (["missing.yaml"], "configuration missing.yaml does not exist (looked in "),
        (["missing"], "missing contains neither"),
        ([".", "--engine"], "belong to a configuration"),
    ],
)
def test_doctor_says_what_it_needs(tmp_path: Path, args: list[str], part: str) -> None:
    done = leeway("doctor", *args, cwd=tmp_path)
    assert done.returncode == EXIT_USAGE and part in done.stderr, done.stderr


def test_help_names_both_uses(tmp_path: Path) -> None:
    text = " ".join(leeway("doctor", "--help", cwd=tmp_path).stdout.split())
    assert "Check a configuration before its run, or the data of a run" in text
    assert "--engine" in text and "--machine" in text


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_have_no_errors(path: Path, tmp_path: Path) -> None:
    """With the machine that each is meant for; the models are too large to be prepared here."""
    config = load_config(path, environ={})
    size = next((size for name, size in SIZES.items() if name in path.stem), 135_000_000)
    machine = replace(GOOD, accelerator=path.stem.startswith("gpu-"))
    site = replace(site_of(tmp_path, config), model=facts(size))
    found = [
        *check_settings(site),
        *check_ports(site),
        *judge_space(config, size, 200 * GIB, 10**6, 0, tmp_path),
        *check_server_memory(site),
        *judge_machine(machine, config),
        *judge_memory(machine, config, size),
    ]
    assert "error" not in levels(found), text_of(found)


def test_a_whole_preflight_of_a_small_run(tmp_path: Path) -> None:
    config = config_of(model=SMALL_TINY, sampling={"max_new_tokens": 10})
    site = site_of(tmp_path / "out", config, **os.environ)
    lines: list[str] = []
    found, directory = run_preflight(
        site, lambda: prepare_model(config.model, tmp_path, task=config.task), progress=lines.append
    )
    assert "error" not in levels(found), text_of(found)
    checks = {f.check for f in found}
    assert {"model", "memory", "disk", "redis", "redis memory", "prompts", "trainer", "export"} <= checks
    assert {"reward", "checkpoint", "ports", "configuration", "clock"} <= checks
    assert directory is not None and len(lines) == 2
    assert not (tmp_path / "out").exists()


def test_a_model_that_cannot_be_had_is_one_of_the_findings(tmp_path: Path) -> None:
    config = config_of(model={"name": str(tmp_path / "missing")}, redis={"maxmemory_mib": 64})
    with pytest.raises(PreflightFailed, match=r"(?s)1 error.*model: .*missing is not a directory"):
        require_ready(
            config, tmp_path / "out", lambda: prepare_model(config.model), lambda _: None, lambda _: None
        )


def test_a_task_that_cannot_be_loaded_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text('{"prompt": "p", "answer": NaN}\n')
    config = config_of(task={"kind": "jsonl", "path": str(path)}, model=SMALL_TINY)
    found, _ = run_preflight(
        site_of(tmp_path / "out", config, **os.environ),
        lambda: prepare_model(config.model, tmp_path, task=config.task),
    )
    errors = [finding for finding in found if finding.level == "error"]
    assert [finding.check for finding in errors] == ["task"], text_of(found)
    assert f"{path}, line 1: field 'answer' is NaN" in errors[0].text


def test_a_large_model_is_not_fetched_for_a_run_that_cannot_start(tmp_path: Path) -> None:
    config = config_of(model={"name": "someone/large-model"}, task={"kind": "digits", "reward": "none:such"})

    def fetch() -> Path:
        raise AssertionError("it was fetched")

    found, directory = run_preflight(site_of(tmp_path, config, **os.environ), fetch)
    assert directory is None and "was not downloaded" in text_of(found)


def test_a_run_made_in_code_has_no_preflight(tmp_path: Path) -> None:
    assert not LocalRun(config_of(), tmp_path / "out").preflight
