"""Processes that hang, crash or print; rewards that fail; a trainer whose model or export is broken."""

from __future__ import annotations

import os
import shutil
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from preflight_support import config_of, edit_json, levels, site_of, text_of

from leeway.errors import LeewayError
from leeway.findings import Finding
from leeway.rewards.isolation import Isolation
from leeway_host.models.base import quiet_libraries
from leeway_host.models.tiny import TinyParams, build_model, build_tokenizer
from leeway_host.preflight.reward import judge_isolation
from leeway_host.preflight.site import Site, read_model
from leeway_host.preflight.trials import TrialProcess

pytestmark = pytest.mark.thorough


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Child processes find modules in `tmp_path`, and not in the working directory (an empty entry)."""
    path = os.pathsep.join(filter(None, [str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))
    return site_of(tmp_path / "out", None, **{**os.environ, "PYTHONPATH": path})


def trial(tmp_path: Path, body: str, limit_s: float = 30.0) -> TrialProcess:
    source = f"""
    import os, subprocess, sys, time
    from leeway.errors import UsageError
    from leeway.findings import Finding, run_trial
    def attempt(config, model):
        yield "the attempt"
    {textwrap.indent(body, "    ")}
    run_trial("part", attempt)
    """
    (tmp_path / "attempt.py").write_text(textwrap.dedent(source))
    return TrialProcess("part", "attempt", limit_s)


@pytest.mark.parametrize(
    ("body", "level", "part"),
    [
        ("print('noise'); yield Finding('ok', 'part', config.task.kind)", "ok", "digits"),
        ("raise UsageError('no such thing')", "error", "no such thing"),
        ("raise ValueError('a bug')", "error", "the attempt failed: ValueError: a bug"),
        ("os.kill(os.getpid(), 11)", "error", "killed by SIGSEGV"),
        ("sys.exit(7)", "error", "exit code 7"),
    ],
)
def test_how_a_process_may_end(tmp_path: Path, site: Site, body: str, level: str, part: str) -> None:
    found = trial(tmp_path, body).run(site)
    assert found[0].level == level and part in text_of(found), text_of(found)


def test_a_process_that_hangs_is_killed_with_its_children(
    tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = (
        "child = subprocess.Popen(['sleep', '600']); open('pid', 'w').write(str(child.pid)); time.sleep(600)"
    )
    monkeypatch.chdir(tmp_path)
    started = time.monotonic()
    found = trial(tmp_path, body, limit_s=6.0).run(site)
    assert time.monotonic() - started < 20
    assert "no answer within 6 s while the attempt" in text_of(found)
    child = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_folder_in_the_working_directory_is_not_imported(
    tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "redis.py").write_text("raise RuntimeError('the wrong module')")
    monkeypatch.chdir(here)
    assert levels(trial(tmp_path, "import redis; yield Finding('ok', 'part', 'fine')").run(site)) == {"ok"}


REWARDS = {
    "raises": ("def score(response, answer, metadata): raise KeyError('final')\n", "error", "KeyError"),
    "not a number": ("def score(response, answer, metadata): return float('nan')\n", "error", "nan"),
    "hangs": ("import time\ndef score(response, answer, metadata): time.sleep(60)\n", "error", "within 1 s"),
    "syntax": ("def score(:\n", "error", "cannot be imported"),
    "no function": ("x = 1\n", "error", "nothing named 'score'"),
    "good": ("def score(response, answer, metadata): return 0.25\n", "ok", "gives 0.25"),
}


@pytest.mark.parametrize("name", REWARDS)
def test_a_reward_is_tried(tmp_path: Path, site: Site, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, level, part = REWARDS[name]
    (tmp_path / "own.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    config = config_of(task={"kind": "digits", "reward": "own:score", "reward_timeout_s": 1.0})
    found = TrialProcess("reward", "leeway_host.preflight.reward", 60.0).run(replace(site, config=config))
    assert found[0].level == level and part in text_of(found), text_of(found)


@pytest.fixture(scope="module")
def good_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    with quiet_libraries():
        tokenizer = build_tokenizer(128)
        build_model(TinyParams(hidden=32, layers=1, heads=2), tokenizer, 128, 0).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    return directory


def broken_export(directory: Path) -> None:
    edit_json(directory / "generation_config.json", temperature=0.6, top_p=0.9)


def not_finite(directory: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], float("inf"))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def another_architecture(directory: Path) -> None:
    edit_json(directory / "config.json", architectures=["T5Model"], model_type="t5")


def no_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (not_finite, "nan"),
        (another_architecture, "error trainer"),
        (None, "the first prompt of"),
    ],
)
def test_the_trainers_model(good_model: Path, tmp_path: Path, damage: Any, part: str) -> None:
    from leeway_trainer.trial import try_trainer

    directory = tmp_path / "copy"
    shutil.copytree(good_model, directory)
    if damage:
        damage(directory)
    config = config_of(model={"max_length": 128})
    try:
        found = [item for item in try_trainer(config, str(directory)) if isinstance(item, Finding)]
    except (LeewayError, OSError, ValueError) as exc:  # as its process reports it
        found = [Finding("error", "trainer", str(exc))]
    assert ("error" in levels(found)) == bool(damage), text_of(found)
    assert part in text_of(found), text_of(found)


@pytest.mark.parametrize(
    "trial", [pytest.param("leeway_trainer.trial", marks=pytest.mark.slow), "leeway_host.preflight.prompts"]
)
def test_a_tokenizer_that_cannot_be_loaded(good_model: Path, tmp_path: Path, site: Site, trial: str) -> None:
    directory = tmp_path / "copy"
    shutil.copytree(good_model, directory)
    no_tokenizer(directory)
    found = TrialProcess("trial", trial, 120.0).run(replace(site, model=read_model(directory)))
    assert levels(found) == {"error"}
    assert "tokenizer" in text_of(found) or "Expecting property name" in text_of(found)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that cannot be read")
def test_an_export_that_would_fail_is_named(good_model: Path, tmp_path: Path) -> None:
    from leeway_trainer.trial import try_trainer

    directory = tmp_path / "copy"
    shutil.copytree(good_model, directory)
    (directory / "notes.txt").symlink_to("/proc/self/mem")
    config = config_of(model={"max_length": 128})
    found = [item for item in try_trainer(config, str(directory)) if isinstance(item, Finding)]
    assert [(f.level, f.check) for f in found] == [("ok", "trainer"), ("error", "export")], text_of(found)
    assert "notes.txt" in found[1].text and "output.save_model=false" in found[1].text


def test_what_reward_code_can_inspect_is_said() -> None:
    same = Isolation(None, 0, "only root can change the user")
    found = judge_isolation(same)
    assert found.level == "warning" and "CAN read the memory" in found.text
    assert judge_isolation(replace(same, landlock=7)).level == "ok"
