"""The trainer's weights, replaced at their edge: a step changes one of a few hundred numbers.

Publication, theta_s, deltas, keyframes and checkpoints are real; the optimiser and the model are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from leeway.config import RunConfig
from leeway.messages import Rollout
from leeway.metrics.areas.lag import LAG_CLIP_FRACTION, LAG_ESS_SEQ, LAG_ESS_TOK
from leeway.metrics.areas.time import TIME_SCORE_S, TIME_TRAIN_S
from leeway.metrics.areas.tokens import TOKENS
from leeway_controller.plan import ticket_seed
from leeway_simulation.numbers import LARGEST, VALUES, draw, ess_after, place_of_change, weights_name
from leeway_trainer.learner import Learner, LoadLearner
from leeway_trainer.policy import LM_PREFIX
from leeway_trainer.snapshot import Snapshot

STEP_S = 0.3
"""Virtual seconds of a step."""


class FewNumbers(nn.Module):
    """In the place of a `PolicyModel`."""

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.arange(VALUES, dtype=torch.float32) % LARGEST
        self.lm = nn.ParameterDict({"first": nn.Parameter(numbers), "second": nn.Parameter(numbers.flip(0))})
        self.head = nn.Identity()


class FewNumbersPolicy:
    """In the place of `leeway_trainer.policy.Policy`; it is its own engine, for checkpoints."""

    def __init__(self, model: FewNumbers, config: RunConfig, ranks: Any) -> None:
        self.model, self.config, self.ranks, self.engine = model, config.trainer, ranks, self

    def named_parameters(self) -> Any:
        for name, parameter in self.model.named_parameters():
            yield name.removeprefix(LM_PREFIX), parameter

    def save_checkpoint(self, directory: str, tag: str, save_latest: bool) -> None:
        folder = Path(directory) / tag
        folder.mkdir()
        (folder / "numbers").write_bytes(b"".join(wire_bytes(p) for _, p in self.named_parameters()))

    def load_checkpoint(self, directory: str, tag: str) -> tuple[str, None]:
        raw = bytearray((Path(directory) / tag / "numbers").read_bytes())
        numbers = torch.frombuffer(raw, dtype=torch.bfloat16).float().reshape(2, VALUES)
        for (_, parameter), row in zip(self.named_parameters(), numbers, strict=True):
            parameter.data.copy_(row)
        return directory, None


class NoKl:
    """In the place of `ResyncKl`."""

    def __init__(self, *args: Any) -> None:
        return

    def before(self) -> dict[str, float]:
        return {}

    def around(self, settle: Callable[[], None]) -> dict[str, float]:
        settle()
        return {}


def wire_bytes(parameter: Any) -> bytes:
    """A parameter as it is sent to samplers."""
    raw: bytes = parameter.detach().to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    return raw


def learner_of(sleep: Callable[[float], None], problem: Callable[[str], None]) -> LoadLearner:
    """Makes learners that tell `problem` about rollouts that other weights than theta_s have drawn."""

    def step(
        policy: Any,
        theta_s: Snapshot,
        rollouts: Sequence[Rollout],
        config: RunConfig,
        number: int,
        pause: Callable[[], None],
        age: int,
    ) -> dict[str, float]:
        weights = weights_name(wire_bytes(p) for _, p in theta_s.tensors())
        for rollout in rollouts:
            header = rollout.header
            seed = ticket_seed(config.seed, header.batch, header.group, header.index)
            if rollout.response_ids.tolist() != draw(seed, weights).tolist():
                problem(
                    f"step {number}: rollout {header.ticket_id} was not drawn from the weights in theta_s"
                )
        sleep(STEP_S)
        pause()
        place = place_of_change(r.response_ids.tobytes() for r in rollouts)
        parameters = [p for _, p in policy.named_parameters()]
        numbers = parameters[place // VALUES].data
        numbers[place % VALUES] = (numbers[place % VALUES] + 1) % LARGEST
        return {
            LAG_ESS_TOK: ess_after(config.seed, number),
            LAG_ESS_SEQ: 1.0,
            LAG_CLIP_FRACTION: 0.0,
            TIME_SCORE_S: 0.1,
            TIME_TRAIN_S: 0.2,
            TOKENS: float(sum(r.response_ids.size for r in rollouts)),
        }

    def load(config: RunConfig, ranks: Any, setup: Any) -> Learner:
        policy: Any = FewNumbersPolicy(FewNumbers(), config, ranks)
        theta_s = Snapshot(FewNumbers(), config.trainer, ranks)  # type: ignore[arg-type]
        return Learner(policy, theta_s, step, NoKl)  # type: ignore[arg-type]

    return load
