"""The resync policy: its rules, their order, and rules of installed packages."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leeway.config import SyncConfig
from leeway.config.load import ConfigError, build_config, dump_config, parse_yaml
from leeway.policies import POLICIES, Policy, PolicyError, SyncFacts, decide, decide_resync, read_facts, shelf
from leeway.registry import Registry

CALM = SyncFacts(step=3, age=1, ess_token=0.99, ess_sequence=0.8, clip_fraction=0.01)


def reason(sync: SyncConfig | None = None, **change: object) -> str | None:
    return decide_resync(dataclasses.replace(CALM, **change), sync or SyncConfig()).reason  # type: ignore[arg-type]


def test_nothing_happens_while_all_is_well() -> None:
    assert reason() is None
    assert decide_resync(CALM, SyncConfig()).action == "continue"


def test_each_rule() -> None:
    assert reason(ess_token=0.49) == "ess"
    assert reason(ess_sequence=0.49) is None
    assert reason(SyncConfig(ess_level="sequence"), ess_sequence=0.49) == "ess"
    assert reason(SyncConfig(ess_threshold=None), ess_token=0.01) is None
    assert reason(clip_fraction=0.031) == "clip_fraction"
    assert reason(SyncConfig(clip_fraction=None), clip_fraction=0.9) is None
    assert reason(SyncConfig(max_age=4), age=4) == "age"
    assert reason(SyncConfig(max_age=4), age=3) is None
    assert reason(SyncConfig(every_n=4), step=3) == "every_n"
    assert reason(SyncConfig(every_n=4), step=4) is None
    assert reason(manual=True) == "manual"


def test_a_threshold_is_not_crossed_by_touching_it() -> None:
    assert reason(ess_token=0.5) is None
    assert reason(SyncConfig(clip_fraction=0.01), clip_fraction=0.01) is None


def test_no_resync_after_the_last_batch() -> None:
    assert reason(ess_token=0.1, manual=True, last=True) is None


@pytest.mark.parametrize("name", ["ess_token", "ess_sequence", "clip_fraction"])
def test_what_is_not_finite_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        reason(**{name: math.nan})


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 50), st.integers(0, 100))
def test_max_age_one_is_always_fresh(ess: float, clip: float, age: int, step: int) -> None:
    assert reason(SyncConfig(max_age=1), ess_token=ess, clip_fraction=clip, age=age, step=step) is not None


THEIRS = """
from pydantic import Field

from leeway.config import Section
from leeway.policies import Policy


class Settings(Section):
    limit: float = Field(default=1.0, gt=0)


def grew(facts, settings):
    return facts.metrics["grad_norm"] > settings.limit


GRAD_NORM = Policy(grew, settings=Settings)
BROKEN = Policy(lambda facts, settings: 1 / 0)
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that registers the policies `grad_norm` and `broken`, as `pip install` leaves it."""
    info = tmp_path / "their_policies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-policies\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[leeway.policies]\ngrad_norm = their_policies:GRAD_NORM\nbroken = their_policies:BROKEN\n"
    )
    (tmp_path / "their_policies.py").write_text(THEIRS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "their_policies", raising=False)
    forget_installed(monkeypatch)


def forget_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = Registry(POLICIES.group, POLICIES.package, POLICIES.attribute, Policy, POLICIES.what)
    monkeypatch.setattr(shelf, "POLICIES", fresh)
    monkeypatch.setattr(decide, "POLICIES", fresh)


def task_with(**sync: object) -> dict[str, object]:
    return {"task": {"kind": "jsonl", "path": "x.jsonl"}, "sync": sync}


def test_the_order_of_the_rules_is_the_documented_one() -> None:
    assert shelf.active_rules(SyncConfig()) == ["manual", "ess", "clip_fraction", "age", "every_n"]
    everything = {"ess_token": 0.1, "clip_fraction": 0.9, "age": 99}
    assert reason(manual=True, **everything) == "manual"
    assert reason(**everything) == "ess"
    assert reason(SyncConfig(every_n=1), age=99, clip_fraction=0.9) == "clip_fraction"
    assert reason(SyncConfig(every_n=1), age=99) == "age"
    assert reason(SyncConfig(every_n=1)) == "every_n"


def test_facts_come_from_the_metrics_of_a_report() -> None:
    metrics = {"lag/ess_tok": 1, "lag/ess_seq": 0.9, "lag/clip_fraction": 0.0, "grad_norm": 2.0, "name": "x"}
    facts = read_facts(metrics, step=3, age=2, last=False)
    assert (facts.ess_token, facts.ess_sequence, facts.clip_fraction) == (1.0, 0.9, 0.0)
    assert facts.metrics["grad_norm"] == 2.0
    assert "name" not in facts.metrics
    with pytest.raises(PolicyError, match="step 3: lag/ess_seq is None, expected a number"):
        read_facts({**metrics, "lag/ess_seq": None}, step=3, age=2, last=False)


@pytest.mark.usefixtures("installed")
def test_an_installed_policy_acts_when_it_is_named() -> None:
    steep = {"metrics": {"grad_norm": 1.5}}
    assert reason(**steep) is None
    assert reason(SyncConfig(policies={"grad_norm": {}}), **steep) == "grad_norm"
    assert reason(SyncConfig(policies={"grad_norm": {"limit": 2.0}}), **steep) is None
    assert reason(SyncConfig(policies={"grad_norm": {}}), ess_token=0.1, **steep) == "ess"


@pytest.mark.usefixtures("installed")
def test_settings_of_an_installed_policy_survive_the_configuration_file() -> None:
    config = build_config(task_with(policies={"grad_norm": {"limit": 2.5}, "broken": {}}))
    assert config.sync.policies == {"grad_norm": {"limit": 2.5}, "broken": {}}
    assert build_config(parse_yaml(dump_config(config), "dump")) == config
    assert build_config(task_with(policies={"grad_norm": {}})).sync.policies == {"grad_norm": {"limit": 1.0}}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ({"grad_nrom": {}}, "sync.policies: unknown policy 'grad_nrom'; available: broken, grad_norm"),
        ({"grad_norm": {"limt": 1.0}}, "grad_norm.limt: unknown key; allowed: limit"),
        ({"grad_norm": {"limit": "x"}}, "grad_norm.limit: got 'x'; Input should be a valid number"),
        ({"grad_norm": {"limit": 0.0}}, "grad_norm.limit: got 0.0; Input should be greater than 0"),
        ({"broken": {"a": 1}}, "broken: this policy has no settings; expected {}, got {'a': 1}"),
        ({"age": {}}, "policy 'age' is always active and has no section"),
    ],
)
def test_what_a_policy_cannot_use_is_refused_with_the_configuration(
    policies: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_config(task_with(policies=policies))


@pytest.mark.usefixtures("installed")
def test_a_policy_that_fails_is_named() -> None:
    with pytest.raises(PolicyError, match="step 3: resync policy 'broken' failed: ZeroDivisionError"):
        reason(SyncConfig(policies={"broken": {}}))


def test_without_an_installed_package_there_is_nothing_to_name() -> None:
    with pytest.raises(ConfigError, match="unknown policy 'theirs'; available: none is installed"):
        build_config(task_with(policies={"theirs": {}}))
