"""What the lab runs: one training run (RunSpec), one experiment (Experiment), both read from YAML files.

An experiment lists its arms, each a change to the common run, and the criterion of its verdict. The files are
versioned with the code, so that a criterion is fixed before the runs it applies to.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from leeway.config import AnyCorrection, SyncConfig, build_correction
from leeway.errors import UsageError

HERE = Path(__file__).parent / "experiments"
NEVER: dict[str, Any] = {"ess_threshold": None, "clip_fraction": None, "max_age": None, "every_n": None}
"""No resync rule: the base of every run of an experiment, independent of the product's defaults."""
ON_POLICY = "on_policy"
"""Label of the arm that the noise floor is measured on: sampler and trainer are identical."""
ON_POLICY_RUN: dict[str, Any] = {
    "condition": {"weights": "exact", "noise": 0.0},
    "fault": "none",
    "correction": {"method": "none"},
    "sync": NEVER | {"max_age": 1},
    "marks": [2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 30, 40],
}
"""Over `common`; the same in all experiments of a learning rate, so that they share its runs."""
FIRST_SEED = 100
"""Lower seeds were used to choose settings before the criteria were written; verdicts do not use them."""
QUICK_SEEDS = 3
FORMAT = 1
"""Increased when the same RunSpec gives a different result; part of the key of stored results."""


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Condition(_Spec):
    """How the sampler's numerics differ from the trainer's."""

    weights: Literal["exact", "bf16", "int8", "fp8", "int4"] = "exact"
    """Round-to-nearest of the linear layers: int8 and fp8 (e4m3) by output channel, int4 by 32 inputs. bf16
    with the engine `pipeline`: the sampler computes in bfloat16."""
    noise: float = Field(default=0.0, ge=0)
    """Relative Gaussian noise W (1 + noise z) on them; z is drawn once per run."""


class ModelSpec(_Spec):
    """The tiny Qwen3-architecture model and the task: sorting digits."""

    hidden: int = 64
    layers: int = 2
    heads: int = 2
    length: int = 6
    """Digits to sort."""
    target_accuracy: float = 0.35
    """Exact answers at temperature 1 after the supervised warm-up."""


class RunSpec(_Spec):
    """One training run of the lab: everything its result depends on."""

    engine: Literal["lab", "pipeline"] = "lab"
    """In this process, or by `leeway run`: vLLM, DeepSpeed and Redis (pipeline.py)."""
    model: ModelSpec = ModelSpec()
    condition: Condition = Condition()
    fault: Literal["none", "top_p", "top_p_reported", "retokenised", "reward_filter", "first_finished"] = (
        "none"
    )
    """An infrastructure fault of leeway_lab.batch_faults; `top_p_reported` is top-p with its support known to
    the trainer, as Leeway has it."""
    correction: AnyCorrection = Field(default_factory=build_correction)
    sync: SyncConfig = SyncConfig.model_validate(NEVER)
    """When the sampler gets the current weights; without a rule it never does."""
    optimizer: Literal["sgd", "adamw"] = "adamw"
    learning_rate: float = Field(default=3e-5, gt=0)
    warmup: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly: the first steps of AdamW are its largest."""
    steps: int = Field(default=40, ge=1)
    prompts: int = Field(default=32, ge=1)
    group_size: int = Field(default=8, ge=1)
    seed: int = 0
    """Of the sampled tokens; the order of the prompts is the same for all seeds."""
    marks: tuple[int, ...] = (5, 10, 20, 30, 40)
    """Optimiser steps after which the weights are kept; 0: at the start."""
    evaluate_every: int = Field(default=0, ge=0)
    """Also draw from the policy itself every so many steps (`own/reward`); the other rewards are those of the
    sampler's weights, which do not change until a resync."""
    excess: bool = False
    """Also measure the gradients of score centring and importance sampling on every batch."""

    def key(self) -> str:
        """Name of the stored result; equal for equal runs."""
        values = self.model_dump(mode="json", exclude={"engine"} if self.engine == "lab" else None)
        data = json.dumps({"format": FORMAT, **values}, sort_keys=True)
        return hashlib.sha256(data.encode()).hexdigest()[:16]


class Experiment(_Spec):
    """A claim, the runs that test it, and the criterion for reproduction."""

    name: str = ""
    version: int = 1
    title: str
    claim: str
    """What the article says."""
    quick: bool = False
    """Part of `leeway lab run --quick`."""
    analysis: str
    """Function of leeway_lab.analyses."""
    criterion: dict[str, Any]
    """Numbers that the analysis judges by, and `text`, which says it in words."""
    common: dict[str, Any] = {}
    """Over the defaults of RunSpec, for all arms."""
    arms: dict[str, dict[str, Any]]
    """Label -> over `common`."""
    seeds: int = Field(default=5, ge=1)
    floor_seeds: int = Field(default=10, ge=2)
    """Of the arm `on_policy`: the floor is in every ratio, so its error is too."""
    first_seed: int = Field(default=FIRST_SEED, ge=FIRST_SEED)
    """A version made after seeing results of the previous one uses new seeds."""

    def runs(self, seeds: int | None = None) -> dict[str, list[RunSpec]]:
        """Label -> one run per seed; `seeds`: that many for every arm."""
        found = {}
        for label, over in self.arms.items():
            count = seeds or (self.floor_seeds if label == ON_POLICY else self.seeds)
            common = merged({"sync": NEVER}, self.common)
            if label == ON_POLICY:
                common = merged(common, ON_POLICY_RUN)
            arm = merged(common, over)
            seeds_used = range(self.first_seed, self.first_seed + count)
            found[label] = [RunSpec.model_validate(merged(arm, {"seed": seed})) for seed in seeds_used]
        return found


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid over `base`, section by section."""
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


@cache
def experiments() -> dict[str, Experiment]:
    """All experiments by name, in the order of their files."""
    found = {}
    for path in sorted(HERE.glob("*.yaml")):
        name = path.stem.split("-", 1)[1]
        found[name] = Experiment.model_validate({**yaml.safe_load(path.read_text()), "name": name})
    return found


def choose(names: list[str], quick: bool) -> list[Experiment]:
    """The experiments asked for: by name, else the quick ones or all. Raises UsageError."""
    known = experiments()
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise UsageError(f"no experiment {', '.join(unknown)}; there are: {', '.join(known)}")
    if names:
        return [known[name] for name in names]
    return [e for e in known.values() if e.quick or not quick]
