"""The checks over real streams: the controller reads along, the hash, the events and the doctor agree."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from leeway.checks.board import FILE_NAME, dump_records, load_records, post_rejected
from leeway.config.load import dump_config
from leeway.errors import UsageError
from leeway.messages import Event, EventHeader, Probe, SamplerStatus, decode
from leeway.statuses import write_status
from leeway.streams import ROLLOUTS_GROUP, Consumer, Keys, Tail, add_fields, now
from leeway.weights import WeightManifest
from leeway_controller.check_feed import CheckFeed
from leeway_host.doctor import diagnose
from leeway_host.launch.checks import CheckFile
from leeway_host.redis_server import EmbeddedRedis
from toy_run import ToyRun, toy_config


class Stage:
    """A toy run on a server, with the controller's side of the checks reading along."""

    def __init__(self, client: redis.Redis, keys: Keys, run: ToyRun) -> None:
        self.client, self.keys, self.run = client, keys, run
        self.checks = CheckFeed(client, keys, run.config)
        self.trainer = Consumer(client, keys.rollouts, ROLLOUTS_GROUP, "trainer")
        self.steps = run.steps(100)

    def play(self, count: int, *, witness: bool = True) -> None:
        """`count` steps. Without `witness` the trainer has deleted the rollouts before they are read here."""
        for _ in range(count):
            step = next(self.steps)
            for epoch, version, digest in step.manifests:
                self.checks.monitor.on_manifest(epoch, version, digest)
            for fields in step.rollouts:
                add_fields(self.client, self.keys.rollouts, fields)
            if not witness:
                self.trainer.ack([entry.id for entry in self.trainer.read(1000, 0.01)])
            self.checks.on_report(step.report)
            self.checks.poll(step.statuses)
            if witness:
                self.trainer.ack([entry.id for entry in self.trainer.read(1000, 0.01)])

    def bad(self) -> dict[str, str]:
        records = load_records(self.client, self.keys, budget_s=5)
        return {n: r.worst.status for n, r in records.items() if r.worst.status != "ok"}

    def events(self) -> list[EventHeader]:
        entries = Tail(self.client, self.keys.events).read(1000, None)
        return [decode(Event, entry.fields).header for entry in entries]


def test_a_clean_run_posts_results_and_no_event(client: redis.Redis, keys: Keys) -> None:
    stage = Stage(client, keys, ToyRun(1, toy_config()))
    stage.play(6)
    assert not stage.bad()
    assert not stage.events()
    names = set(load_records(client, keys, budget_s=5))
    assert {"deferral/lengths", "reward_filter/rewards", "sampling_distribution/calibration"} <= names
    groups = client.xinfo_groups(keys.rollouts)
    assert [g["name"] for g in groups] == [ROLLOUTS_GROUP.encode()], "read along, outside of any group"


def test_a_witness_that_comes_too_late_accuses_nobody(client: redis.Redis, keys: Keys) -> None:
    stage = Stage(client, keys, ToyRun(1, toy_config()))
    stage.play(4, witness=False)
    assert not stage.bad()
    assert "deferral/lengths" not in load_records(client, keys, budget_s=5), "there is nothing to compare"


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("nan_logprob", "numerics/non_finite"),
        ("reward_filter", "reward_filter/groups"),
        ("first_finished", "deferral/outstanding"),
        ("reencoded_text", "retokenisation/ids_unchanged"),
        ("wrong_digest", "version/attested"),
    ],
)
def test_a_fault_is_one_event_and_stays(client: redis.Redis, keys: Keys, fault: str, name: str) -> None:
    stage = Stage(client, keys, ToyRun(2, toy_config(), fault=fault, fault_from=6))
    stage.play(6)
    assert not stage.bad()
    stage.play(2)
    assert stage.bad()[name] == "fail"
    found = [e for e in stage.events() if e.data.get("name") == name]
    assert [(e.level, e.name, e.data["status"]) for e in found] == [("error", "check", "fail")]
    stage.run.fault = ""
    stage.play(1)
    again = Stage(client, keys, ToyRun(3, toy_config()))  # a restarted controller
    again.play(3)
    assert again.bad()[name] == "fail"
    assert len([e for e in again.events() if e.data.get("name") == name]) == 1


def test_what_the_trainer_rejected_is_not_overwritten(client: redis.Redis, keys: Keys) -> None:
    stage = Stage(client, keys, ToyRun(1, toy_config()))
    stage.play(1)
    post_rejected(client, keys, "step 3: loss is nan", source="trainer", budget_s=5)
    stage.play(1)
    assert stage.bad() == {"numerics/non_finite": "fail"}


def test_the_copy_in_the_directory_keeps_what_an_earlier_part_found(
    client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    stage = Stage(client, keys, ToyRun(2, toy_config(), fault="reward_filter"))
    stage.play(1)
    first = CheckFile(client, keys, tmp_path)
    first.close()
    assert first.counts()["checks/fail"] >= 2
    other = Keys(keys.run + "-resumed")
    Stage(client, other, ToyRun(1, toy_config())).play(2)
    resumed = CheckFile(client, other, tmp_path)
    resumed.update(budget_s=5)
    assert resumed.counts()["checks/fail"] == first.counts()["checks/fail"]
    assert diagnose(str(tmp_path)).failed


@pytest.fixture
def answering_sampler(client: redis.Redis, keys: Keys) -> Iterator[None]:
    """A sampler that answers requests for probes."""
    stop = threading.Event()

    def answer() -> None:
        while not stop.wait(0.05):
            asked = int(client.get(keys.probe) or 0)  # type: ignore[arg-type]
            status = SamplerStatus(sampler="s", heartbeat=now(), probe=Probe(request=asked, dof=3, chi2=2.0))
            write_status(client, keys, status, budget_s=5)

    thread = threading.Thread(target=answer)
    thread.start()
    yield
    stop.set()
    thread.join()


def test_the_doctor_of_a_live_run(
    client: redis.Redis, keys: Keys, redis_server: EmbeddedRedis, answering_sampler: None
) -> None:
    with pytest.raises(UsageError, match="no run"):
        diagnose(redis_server.url)
    client.hset(keys.state, "controller", "{}")
    stage = Stage(client, keys, ToyRun(1, toy_config()))
    stage.play(2)
    diagnosis = diagnose(redis_server.url)
    assert (diagnosis.run, diagnosis.failed, diagnosis.notes) == (keys.run, [], [])
    assert diagnosis.records["controller/alive"].latest.status == "ok"
    with pytest.raises(UsageError, match="no run 'other'"):
        diagnose(redis_server.url, "other")
    client.hset(Keys("second").state, "controller", "{}")
    with pytest.raises(UsageError, match="--name"):
        diagnose(redis_server.url)
    records = load_records(client, keys, budget_s=5)
    for name, record in records.items():
        old = record.model_copy(update={"at": time.time() - 300})
        client.hset(keys.checks, f"controller:{name}", old.model_dump_json())
    assert [r.name for r in diagnose(redis_server.url, keys.run).failed] == ["controller/alive"]


def test_the_doctors_exit_codes(client: redis.Redis, keys: Keys, tmp_path: Path) -> None:
    def leeway(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "leeway_host", "doctor", *args]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    nothing = leeway(str(tmp_path / "nowhere"))
    assert nothing.returncode == 2
    assert "expected a run's output directory" in nothing.stderr
    run = ToyRun(4, toy_config())
    stage = Stage(client, keys, run)
    stage.play(3)
    (tmp_path / "config.yaml").write_text(dump_config(run.config))
    (tmp_path / FILE_NAME).write_text(dump_records(load_records(client, keys, budget_s=5)))
    good = leeway(str(tmp_path), "--json")
    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout)["status"] == "ok"
    # A step that only metrics.jsonl knows: the controller was not there any more.
    row = {"step": 9, "epoch": 0, "time": 1.0, "weights/version": 0, "lag/abs_max": 25.0, "lag/beyond_20": 3}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    bad = leeway(str(tmp_path))
    assert bad.returncode == 1
    assert "numerics/log_ratio" in bad.stdout
    (tmp_path / FILE_NAME).write_text("{")
    assert leeway(str(tmp_path)).returncode == 2


def test_manifests_are_taken_as_published(client: redis.Redis, keys: Keys) -> None:
    import torch

    from leeway.weights import publish_weights

    manifest: WeightManifest = publish_weights(
        client, keys, epoch=0, version=0, step=0, tensors=[("w", torch.ones(4))], wire_dtype="float32"
    )
    checks = CheckFeed(client, keys, toy_config())
    checks.on_manifest(manifest)
    held = SamplerStatus(sampler="s", heartbeat=now(), epoch=0, version=0, digest=manifest.digest)
    checks.poll([held])
    assert load_records(client, keys, budget_s=5)["version/attested"].worst.status == "ok"
    checks._statuses_at = 0.0
    checks.poll([held.model_copy(update={"digest": "other"})])
    assert load_records(client, keys, budget_s=5)["version/attested"].worst.status == "fail"
