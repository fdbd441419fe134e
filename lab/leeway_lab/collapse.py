"""Analyses of runs that collapse: where on a grid, and which KL shows it."""

from __future__ import annotations

from typing import Any

import numpy as np

from leeway_lab.measure import Array
from leeway_lab.results import Figure, Results, Series, Status, Verdict


def hidden_collapse(results: Results) -> Verdict:
    """A run that collapses: KL on the sampler's prefixes and on the policy's own."""
    want, arm = results.experiment.criterion, "stale"
    every = results.specs[arm][0].evaluate_every
    reward = results.column(arm, "own/reward")
    collapsed = collapse_steps(reward, every, want)
    marks = results.marks(arm)
    own = np.array(
        [
            [results.divergence.kl(run.weights[m], [run.weights[marks[0]]])[0].mean() for m in marks[1:]]
            for run in results.runs(arm)
        ]
    )
    tokens = results.column(arm, "own/length").mean()
    per_token = own / tokens
    on_sampler = results.column(arm, "kl/sampler_prefix")[:, [m - 1 for m in marks[1:]]]
    factor = per_token / np.maximum(on_sampler, 1e-9)
    happened = [c for c in collapsed if c is not None]
    share = float(factor[:, -1].mean())
    status: Status = "inconclusive"
    if 2 * len(happened) > len(collapsed):
        status = "reproduced" if share >= want["least_factor"] else "not reproduced"
    x = [float(m) for m in marks[1:]]
    return Verdict(
        status=status,
        text=(
            f"{len(happened)} of {len(collapsed)} runs collapsed (at steps "
            f"{', '.join(map(str, happened)) or 'none'}); at the last mark KL to the sampler's weights per "
            f"token is {float(per_token[:, -1].mean()):.3g} nats on own prefixes, "
            f"{float(on_sampler[:, -1].mean()):.3g} on the sampler's: a factor of {share:.1f}"
        ),
        numbers={"collapsed_at": collapsed, "factor": share},
        figures=[
            Figure(
                "Reward of the policy's own responses",
                "optimiser step",
                "mean reward",
                [
                    Series(
                        arm,
                        [float(every * (i + 1)) for i in range(reward.shape[1])],
                        reward.mean(0).tolist(),
                        reward.min(0).tolist(),
                        reward.max(0).tolist(),
                    )
                ],
            ),
            Figure(
                "KL(pi_theta || pi_s) per token",
                "optimiser step",
                "nats",
                [
                    Series("on own prefixes", x, per_token.mean(0).tolist()),
                    Series("on the sampler's prefixes", x, on_sampler.mean(0).tolist()),
                ],
                log_y=True,
            ),
        ],
    )


def collapse_steps(reward: Array, every: int, want: dict[str, Any]) -> list[int | None]:
    """Of each row of reward [runs, evaluations every `every` steps], the step from which it stays below
    `share_of_peak` of its running peak for `steps` steps."""
    low = reward < want["share_of_peak"] * np.maximum.accumulate(reward, axis=1)
    run_of = max(1, want["steps"] // every)
    return [
        next((every * (i + 1) for i in range(len(row) - run_of + 1) if row[i : i + run_of].all()), None)
        for row in low
    ]


def collapse_grid(results: Results) -> Verdict:
    """Which runs collapse over staleness and learning rate, and the boundary between them."""
    want = results.experiment.criterion
    cells: dict[tuple[int, float], list[bool]] = {}
    for arm, specs in results.specs.items():
        age = specs[0].sync.max_age or specs[0].steps
        steps = collapse_steps(results.column(arm, "own/reward"), specs[0].evaluate_every, want)
        cells[age, specs[0].learning_rate] = [step is not None for step in steps]
    x = np.array([(1.0, np.log2(k), np.log2(lr)) for (k, lr), runs in cells.items() for _ in runs])
    y = np.array([float(run) for runs in cells.values() for run in runs])
    rng = np.random.default_rng(0)
    seeds = len(y) // len(cells)
    draws = []
    for _ in range(400):
        rows = np.concatenate([i * seeds + rng.integers(0, seeds, seeds) for i in range(len(cells))])
        draws.append(logistic_fit(x[rows], y[rows]))
    fit, (low, high) = logistic_fit(x, y), np.quantile(draws, [0.025, 0.975], axis=0)
    share = float(y.mean())
    status: Status = "reproduced" if low[1] > 0 and low[2] > 0 else "not reproduced"
    if not want["least_share"] <= share <= 1 - want["least_share"]:
        status = "inconclusive"
    slope = float(fit[1] / fit[2])
    return Verdict(
        status=status,
        text=(
            f"{int(y.sum())} of {len(y)} runs collapse; log-odds per doubling of the staleness {fit[1]:.2f} "
            f"[{low[1]:.2f}, {high[1]:.2f}], of the learning rate {fit[2]:.2f} [{low[2]:.2f}, {high[2]:.2f}]"
            f"; boundary: learning rate ~ staleness^-{slope:.2f}"
        ),
        numbers={
            "collapsed": {f"every {k}, {lr:g}": sum(runs) for (k, lr), runs in cells.items()},
            "fit": fit.tolist(), "low": low.tolist(), "high": high.tolist(), "exponent": slope,
        },
        figures=[
            Figure(
                "Share of runs that collapse",
                "learning rate",
                "share",
                [
                    Series(
                        f"resync every {age} steps",
                        sorted(lr for k, lr in cells if k == age),
                        [float(np.mean(cells[age, lr])) for lr in sorted(lr for k, lr in cells if k == age)],
                    )
                    for age in sorted({k for k, _ in cells})
                ],
                log_x=True,
            )
        ],
    )  # fmt: skip


def logistic_fit(x: Array, y: Array, ridge: float = 0.05) -> Array:
    """Coefficients [columns] of P(y) = sigmoid(x b), by Newton's method; the small ridge, not on the first
    column, keeps them finite if a line separates the classes."""
    penalty = ridge * np.diag([0.0] + [1.0] * (x.shape[1] - 1))
    shift = x.mean(0) * ([0.0] + [1.0] * (x.shape[1] - 1))
    centred, beta = x - shift, np.zeros(x.shape[1])
    for _ in range(50):
        p = 1 / (1 + np.exp(-np.clip(centred @ beta, -30, 30)))
        hessian = centred.T @ (centred * (p * (1 - p))[:, None]) + penalty + 1e-9 * np.eye(x.shape[1])
        step = np.linalg.solve(hessian, centred.T @ (y - p) - penalty @ beta)
        beta = beta + np.clip(step, -2, 2)
    beta[0] -= shift @ beta
    return np.asarray(beta)
