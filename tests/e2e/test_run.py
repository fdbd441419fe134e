"""The main job, end to end: real vLLM, DeepSpeed and Redis, started by `leeway run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_support import StartRun
from otlp_receiver import otlp_receiver
from trace_checks import assert_broadcasts, assert_whole

from leeway.metrics import find_metric
from leeway_host.report.page import ROW_FIELDS

SUMMARY_KEYS = {
    "status", "steps", "method", "model", "seed", "wall_s", "reward", "ess_token", "ess_sequence", "lag_var",
    "discrepancy_kl", "weight_age", "resyncs", "versions", "tokens_generated", "tokens_trained",
    "tokens_voided", "sampler_busy_fraction", "trainer_busy_fraction",
}  # fmt: skip


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        return str(response.read(), "utf-8")


def test_a_whole_run(start_run: StartRun, ports: Iterator[int]) -> None:
    port = next(ports)  # and the two after it
    with otlp_receiver() as receiver:
        telemetry = {"otlp_endpoint": receiver.http, "metrics_port": port, "log_format": "json"}
        run = start_run("--json", telemetry=telemetry)
        run.wait_for(lambda: run.rows(), 300)
        controller, trainer, sampler = (scrape(port + i) for i in range(3))
        code, output = run.finish()
    assert code == 0, output
    assert_whole(receiver, steps=4, responses=16)
    assert_broadcasts(receiver, versions=2, samplers=1)
    assert "leeway_controller_batches_issued_total" in controller
    assert "leeway_trainer_steps_total 1.0" in trainer or "leeway_trainer_steps_total 2.0" in trainer
    assert 'leeway_sampler_responses_total{outcome="published"}' in sampler
    for service in ("controller", "trainer", "sampler-0"):
        lines = (run.out / "logs" / f"{service}.log").read_text().splitlines()
        assert any(line.startswith('{"time"') and json.loads(line)["message"] for line in lines)
    run.assert_nothing_left()
    summary = run.summary()
    assert summary.keys() >= SUMMARY_KEYS
    assert (summary["status"], summary["steps"], summary["method"]) == ("completed", 4, "dlc")
    assert json.loads(output.splitlines()[-1]) == summary
    assert summary["versions"] == [0, 0, 1, 1]
    assert summary["weight_age"] == [0, 1, 0, 1]
    assert [(r["step"], r["version"], r["reason"]) for r in summary["resyncs"]] == [(1, 1, "age")]
    assert summary["tokens_generated"] >= summary["tokens_trained"] > 0
    rows = run.rows()
    for row in rows:
        assert row["disc/abs_mean"] < 0.02
        if row["lag/age"] == 0:
            assert row["lag/ess_tok"] > 0.98
        assert row["verdict/self"] == 0
        unknown = {name for name in row if find_metric(name) is None} - ROW_FIELDS
        assert not unknown, "declared in leeway.metrics.areas"
    for name in ("config.yaml", "model/config.json", "checkpoints/latest", "logs/sampler-0.log"):
        assert (run.out / name).exists(), name
    report = subprocess.run(
        [sys.executable, "-m", "leeway_host", "report", str(run.out)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert report.returncode == 0, report.stderr
    assert "plotly" in Path(report.stdout.strip()).read_text().lower()

    doctor = subprocess.run(
        [sys.executable, "-m", "leeway_host", "doctor", str(run.out), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert doctor.returncode == 0, doctor.stdout
    checks = json.loads(doctor.stdout)["checks"]
    assert {record["worst"]["status"] for record in checks.values()} == {"ok"}
    assert len(checks) > 15


REFUSALS = {
    "missing model": ({"model": {"name": "./no/such/model", "params": {}}}, (), "no/such/model"),
    "unknown task": ({"task": {"kind": "reasoning_gym", "name": "chain_sun"}}, (), "chain_sun"),
    "unreadable line": ({"task": {"kind": "jsonl", "path": "{tmp}/bad.jsonl"}}, (), "line 2"),
    "wrong password": ({}, ("--redis", "{wrong}"), "check the user and password"),
    "no server": ({}, ("--redis", "redis://127.0.0.1:1/0"), "127.0.0.1:1"),
    "port in use": ({"sampler": {"http_port": -1}}, (), "http_port"),
    "bad value": ({"sync": {"max_age": 0}}, (), "sync.max_age"),
    "reward that is not there": ({"task": {"reward": "no_module:f"}}, (), "no_module"),
    "resume of nothing": ({}, ("--resume", "{tmp}"), "no run there"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_used_is_refused_with_one_message(
    start_run: StartRun, tmp_path: Path, redis_server: object, case: str
) -> None:
    import socket

    sections, args, words = REFUSALS[case]
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": \n')
    wrong = f"redis://:wrong@127.0.0.1:{redis_server.port}/0"  # type: ignore[attr-defined]
    text = json.dumps(sections).replace("{tmp}", str(tmp_path))
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        text = text.replace('"http_port": -1', f'"http_port": {busy.getsockname()[1]}')
        filled = [a.replace("{wrong}", wrong).replace("{tmp}", str(tmp_path)) for a in args]
        run = start_run(*filled, **json.loads(text))
        code, output = run.finish(200)
    assert code == 2, output
    messages = [line for line in output.splitlines() if line.startswith("leeway: ")]
    assert len(messages) == 1, output
    assert words in output
    assert "Traceback" not in output
    run.assert_nothing_left()


def test_a_run_does_not_overwrite_another(start_run: StartRun, tmp_path: Path) -> None:
    out = tmp_path / "there"
    out.mkdir()
    (out / "metrics.jsonl").write_text("{}\n")
    code, output = start_run(out=out).finish(120)
    assert code == 2
    assert "--resume" in output


def test_help_loads_nothing_heavy() -> None:
    code = "import sys, leeway_host.cli.app; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, env=os.environ).returncode == 0
