"""Learner: the weights of a trainer and what is computed with them, apart from the loop that decides when.

theta      the policy that is trained             policy.py
theta_s    the weights that the samplers hold     snapshot.py
step       one optimiser step on one batch        step.py
kl         KL around a resync                     prefixes.py
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

from leeway.checkpoints.state import CHECKPOINTS, MODEL_FILES
from leeway.config import RunConfig
from leeway.models.base import model_directory
from leeway.models.files import keep_model_files
from leeway_trainer.epochs import TrainerSetup
from leeway_trainer.export import rehearse_export
from leeway_trainer.model import DTYPES, PolicyModel, load_policy_model
from leeway_trainer.policy import Policy
from leeway_trainer.prefixes import ResyncKl
from leeway_trainer.ranks import Ranks
from leeway_trainer.snapshot import Snapshot
from leeway_trainer.step import train_step
from leeway_trainer.timing import Metrics


@dataclass(frozen=True)
class Learner:
    """See the module's docstring; `step` and `kl` have the signatures of `train_step` and `ResyncKl`."""

    policy: Policy
    theta_s: Snapshot
    step: Callable[..., Metrics]
    kl: Callable[..., ResyncKl]


LoadLearner = Callable[[RunConfig, Ranks, TrainerSetup], Learner]
"""Makes the learner of one rank from the model; every rank calls it."""


def load_learner(config: RunConfig, ranks: Ranks, setup: TrainerSetup) -> Learner:
    """Load the model twice, as theta and as theta_s, and make sure that it can be exported in the end.

    Raises UsageError for a model or a setting that cannot be used.
    """
    model = load_policy_model(
        setup.model,
        dtype=DTYPES[config.trainer.dtype],
        chunk_tokens=config.trainer.logits_chunk_tokens,
        trust_remote_code=config.model.trust_remote_code,
    )
    if ranks.first:
        _prepare_exports(model, config, setup)
    theta_s = Snapshot(copy.deepcopy(model), config.trainer, ranks)
    return Learner(Policy(model, config.trainer, ranks), theta_s, train_step, ResyncKl)


def _prepare_exports(model: PolicyModel, config: RunConfig, setup: TrainerSetup) -> None:
    """Keep beside the checkpoints what an export of them needs, and try the export of the end now."""
    keep_model_files(model_directory(setup.model), setup.out / CHECKPOINTS / MODEL_FILES)
    if config.output.save_model:
        rehearse_export(model.lm, setup.model, setup.out)
