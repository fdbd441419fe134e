"""Every correction on one saved batch: `python -m leeway_trainer.compare DIR`, which `leeway corrections
compare` runs.

theta_s -> log pi_s once; then for each correction theta -> log pi_theta -> loss -> gradient of all weights,
in the run's dtype, summed over micro-batches in float32. Nothing is trained.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leeway.config import CorrectionConfig, RunConfig, build_correction
from leeway.config.correction import DEFAULT_METHOD
from leeway.corrections import METHODS, TokenBatch, lag_metrics, lr_scale, prepare, surrogate_loss
from leeway.errors import EXIT_OK, LeewayError
from leeway.messages import Rollout
from leeway.metrics.areas.correction import WEIGHT_CLIPPED, WEIGHT_MEAN, WEIGHT_SQ_MEAN
from leeway.metrics.areas.discrepancy import DISC_ABS_MEAN
from leeway.metrics.areas.lag import LAG_ESS_GEO, LAG_ESS_SEQ, LAG_ESS_TOK
from leeway_trainer.batch import MicroBatch, rank_micro_batches
from leeway_trainer.model import DTYPES, PolicyModel, PolicyOutput, load_policy_model
from leeway_trainer.saved_batch import find_batch, load_batch
from leeway_trainer.step import denominators, response_advantages, tail_query, token_batch


@dataclass(frozen=True)
class Row:
    """What one correction does to the batch."""

    correction: str
    grad_norm: float
    """L2 norm over all weights, before any clipping of the norm."""
    cosine: float
    """With the gradient of `dlc`."""
    weight_mean: float
    weight_ess: float
    """(sum w)^2 / (n sum w^2) of the token weights that multiply the score."""
    clipped: float
    """Share of tokens whose weight is not the bare ratio."""
    lr_scale: float


Gradient = list[Tensor]
"""One tensor per weight."""


def dot(a: Gradient, b: Gradient) -> float:
    """Inner product in float64."""
    return sum(float((x.double() * y.double()).sum()) for x, y in zip(a, b, strict=True))


def variants(base: CorrectionConfig) -> list[tuple[str, CorrectionConfig]]:
    """(label, settings) of all rows, the default method first.

    The run's settings stay, except where a row changes them: all of them for the run's own method, those that
    every method has for the others.
    """
    rows = []
    for name in [DEFAULT_METHOD, *(name for name in METHODS if name != DEFAULT_METHOD)]:
        own = base.model_dump() if name == base.method else base.common()
        for label, over in METHODS[name].variants.items():
            settings = build_correction({**own, "method": name, **over})
            rows.append((f"{name} {label}".strip(), settings))
    return rows


class SavedStep:
    """A saved batch, ready to be differentiated under any correction."""

    def __init__(self, directory: Path, rollouts: Sequence[Rollout], config: RunConfig, age: int) -> None:
        self.config, self.age = config, age
        self.theta = self._load(directory / "theta")
        self.theta_s = self._load(directory / "theta_s").requires_grad_(False)
        self.counts = denominators(rollouts, config)
        self.advantages = response_advantages(rollouts, config)
        vocabulary = int(self.theta.lm.config.get_text_config().vocab_size)
        self.batches: list[MicroBatch] = rank_micro_batches(
            rollouts,
            budget_tokens=config.trainer.micro_batch_tokens,
            temperature=config.sampling.temperature,
            vocabulary=vocabulary,
            packed=self.theta.shares_prompts,
        )
        with torch.no_grad():
            self.scores: list[PolicyOutput] = [self.theta_s(b, with_hidden=True) for b in self.batches]
            every = [self.tokens(i, self.theta(b)) for i, b in enumerate(self.batches)]
        self.whole = _joined(every)

    def _load(self, directory: Path) -> PolicyModel:
        trainer = self.config.trainer
        return load_policy_model(
            directory, dtype=DTYPES[trainer.dtype], chunk_tokens=trainer.logits_chunk_tokens,
            trust_remote_code=self.config.model.trust_remote_code,
        )  # fmt: skip

    def tokens(self, i: int, output: PolicyOutput) -> TokenBatch:
        """Micro-batch `i` as corrections see it."""
        batch = token_batch(self.batches[i], output, self.scores[i], self.advantages, self.counts)
        return replace(batch, age=torch.full_like(batch.logp, float(self.age)))

    def gradient(self, correction: CorrectionConfig) -> tuple[Gradient, dict[str, float]]:
        """(gradient of all weights, float32; token means of the method's metrics)."""
        prepared = prepare(self.whole, correction)
        parameters = [p for p in self.theta.parameters() if p.requires_grad]
        total = [torch.zeros(p.shape, dtype=torch.float32) for p in parameters]
        sums: dict[str, float] = {}
        for i, batch in enumerate(self.batches):
            tail = None
            if correction.needs_sync_tail:
                tail = tail_query(batch, self.scores[i], self.theta_s.head, self.advantages, correction)
            tokens = replace(self.tokens(i, self.theta(batch, tail)), prepared=prepared)
            loss, metrics = surrogate_loss(tokens, correction)
            for one, found in zip(
                total, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True
            ):
                if found is not None:
                    one += found.float()
            for name, value in metrics.items():
                share = int(tokens.mask.sum()) / self.counts.tokens
                sums[name] = sums.get(name, 0.0) + share * float(value)
        return total, sums

    def row(self, label: str, correction: CorrectionConfig, of_dlc: Gradient | None) -> tuple[Row, Gradient]:
        """One row of the table, and the gradient behind it; `of_dlc` None: this is dlc."""
        gradient, metrics = self.gradient(correction)
        other = gradient if of_dlc is None else of_dlc
        norm = math.sqrt(dot(gradient, gradient))
        product = norm * math.sqrt(dot(other, other))
        mean, square = metrics.get(WEIGHT_MEAN, 0.0), metrics.get(WEIGHT_SQ_MEAN, 0.0)
        return Row(
            correction=label,
            grad_norm=norm,
            cosine=dot(gradient, other) / product if product else 0.0,
            weight_mean=mean,
            weight_ess=mean**2 / square if square else 0.0,
            clipped=metrics.get(WEIGHT_CLIPPED, 0.0),
            lr_scale=lr_scale(self.whole, correction),
        ), gradient

    def lag(self) -> dict[str, float]:
        """Lag and discrepancy of the batch."""
        b = self.whole
        return lag_metrics(
            b.logp, b.logp_sync, b.logp_mu, b.mask, b.seq_ids, b.advantages, self.config.correction
        )


def _joined(parts: Sequence[TokenBatch]) -> TokenBatch:
    # The global batch without heads, float64, for what methods prepare.
    def column(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts]).double()

    logp = column("logp")
    return TokenBatch(
        logp=logp,
        logp_sync=column("logp_sync"),
        logp_mu=column("logp_mu"),
        advantages=column("advantages"),
        mask=torch.ones_like(logp, dtype=torch.bool),
        seq_ids=column("seq_ids").long(),
        denominators=parts[0].denominators,
    )


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="leeway corrections compare", description="Re-score a saved batch under every correction."
    )
    parser.add_argument("dir", type=Path, help="output directory of a run, or one of its batches/step-*")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--json", action="store_true", dest="as_json")
    return parser.parse_args(argv)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """The comparison as data; progress on stderr."""
    from rich.console import Console
    from rich.progress import track

    directory = find_batch(args.dir)
    info, rollouts, config = load_batch(directory, args.sets)
    saved = SavedStep(directory, rollouts, config, info.age)
    rows: list[Row] = []
    of_dlc: Gradient | None = None
    todo = variants(config.correction)
    for label, correction in track(todo, "comparing", console=Console(stderr=True), transient=True):
        row, gradient = saved.row(label, correction, of_dlc)
        of_dlc = gradient if of_dlc is None else of_dlc
        rows.append(row)
    return {
        "batch": str(directory),
        **info.model_dump(exclude={"format"}),
        "responses": len(rollouts),
        "tokens": saved.counts.tokens,
        "lag": saved.lag(),
        "corrections": [asdict(row) for row in rows],
    }


def show(result: dict[str, Any]) -> None:
    """The comparison as a table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    lag = result["lag"]
    console = Console()
    console.print(
        f"step {result['step']}, weights {result['age']} steps old: {result['responses']} responses, "
        f"{result['tokens']} tokens; ESS of the lag ratio {lag[LAG_ESS_TOK]:.3f} (token) "
        f"{lag[LAG_ESS_SEQ]:.3f} (sequence) {lag[LAG_ESS_GEO]:.3f} (geometric); "
        f"discrepancy {lag[DISC_ABS_MEAN]:.2g} nats",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("correction", no_wrap=True)
    for name in ("|grad|", "cos dlc", "mean w", "ESS w", "clipped", "lr x"):
        table.add_column(name, justify="right")
    for row in result["corrections"]:
        table.add_row(
            row["correction"],
            f"{row['grad_norm']:.3g}",
            f"{row['cosine']:.4f}",
            f"{row['weight_mean']:.3f}",
            f"{row['weight_ess']:.3f}",
            f"{row['clipped']:.1%}",
            f"{row['lr_scale']:.3f}",
        )
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    logging.basicConfig(level=logging.ERROR, format="leeway: %(message)s")
    try:
        with redirect_stdout(sys.stderr):  # libraries talk there; the result alone goes to stdout
            result = compare(args)
    except LeewayError as error:
        logging.error("%s", error)
        return error.exit_code
    if args.as_json:
        print(json.dumps(result))
    else:
        show(result)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
