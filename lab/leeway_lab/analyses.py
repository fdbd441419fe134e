"""One function per kind of experiment: kept runs and a criterion in, a verdict out. Nothing is run here."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from leeway.metrics.areas.discrepancy import DISC_ABS_MEAN
from leeway.metrics.areas.lag import (
    LAG_ESS_SEQ,
    LAG_ESS_TOK,
    LAG_PREDICTED_ESS_SEQ,
    LAG_PREDICTED_ESS_TOK,
    LAG_VAR_SEQ,
)
from leeway_lab.collapse import collapse_grid, hidden_collapse
from leeway_lab.measure import Ratio
from leeway_lab.results import (
    Figure,
    Results,
    Series,
    Status,
    Verdict,
    bounds,
    first_departure,
    mean_line,
    ratio_figure,
    rounded,
)
from leeway_lab.spec import ON_POLICY

ESS = {"tok": LAG_ESS_TOK, "seq": LAG_ESS_SEQ}
PREDICTED_ESS = {"tok": LAG_PREDICTED_ESS_TOK, "seq": LAG_PREDICTED_ESS_SEQ}


def decomposition(results: Results) -> Verdict:
    """The split of the error is exact; the discrepancy stays while the lag grows."""
    want, arm = results.experiment.criterion, "stale"
    gap = float(results.column(arm, "split/error").max())
    disc, lag = results.column(arm, DISC_ABS_MEAN).mean(0), results.column(arm, LAG_VAR_SEQ).mean(0)
    part = max(1, len(disc) // 4)
    drift = float(disc[-part:].mean() / disc[:part].mean())
    growth = float(lag[-part:].mean() / max(lag[1], 1e-12))
    good = (
        gap <= want["largest_error"]
        and 1 / want["largest_drift"] <= drift <= want["largest_drift"]
        and growth >= want["least_growth"]
    )
    return Verdict(
        status="reproduced" if good else "not reproduced",
        text=(
            f"largest error of the split {gap:.1e} nats; last quarter of the run against the first: "
            f"mean |discrepancy| x {drift:.2f}; variance of the lag x {growth:.0f} against one step"
        ),
        numbers={"largest_error": gap, "discrepancy_drift": drift, "lag_growth": growth},
        figures=[
            Figure(
                "Discrepancy and lag",
                "optimiser step",
                "nats",
                [
                    mean_line(results, arm, DISC_ABS_MEAN, "mean |log pi_s - log mu|"),
                    mean_line(results, arm, "lag/sd", "standard deviation of log pi_theta - log pi_s"),
                ],
                log_y=True,
            )
        ],
    )


def departure(results: Results) -> Verdict:
    """Where importance sampling leaves the floor, and where ESS and its Gaussian forecast cross 0.5."""
    want, arm = results.experiment.criterion, "is_stale"
    ratios = results.ratios(arm)
    left = first_departure(ratios, want["floors"])
    crossings = {level: results.first_below(arm, name, 0.5) for level, name in ESS.items()}
    forecasts = {level: results.first_below(arm, name, 0.5) for level, name in PREDICTED_ESS.items()}
    distances = {
        level: abs(crossing - left)
        for level, crossing in crossings.items()
        if crossing is not None and left is not None
    }
    near = {level for level, distance in distances.items() if distance <= want["largest_distance"]}
    earlier = {
        level
        for level in near
        if (forecast := forecasts[level]) is None or crossings[level] <= forecast  # type: ignore[operator]
    }
    status: Status = "reproduced" if earlier else "not reproduced"
    if left is None and all(c is None for c in crossings.values()):
        status = "inconclusive"
    better = min(distances, key=lambda level: distances[level]) if distances else None
    return Verdict(
        status=status,
        text=(
            f"importance sampling leaves {want['floors']:g} floors at step {_at(left)}; ESS below 0.5: token "
            f"at step {_at(crossings['tok'])}, sequence at step {_at(crossings['seq'])}; Gaussian forecast: "
            f"token {_at(forecasts['tok'])}, sequence {_at(forecasts['seq'])}; nearer to the departure: "
            f"{ {'tok': 'token', 'seq': 'sequence', None: 'none'}[better] }"
        ),
        numbers={"departure": left, "ess": crossings, "forecast": forecasts, "ratios": rounded(ratios)},
        figures=[
            ratio_figure({"importance sampling, never resynced": ratios}, "Departure from the noise floor"),
            Figure(
                "ESS of the lag ratio",
                "optimiser step",
                "ESS / n",
                [
                    mean_line(results, arm, names[level], f"{level}, {label}")
                    for level in ("tok", "seq")
                    for names, label in ((ESS, "measured"), (PREDICTED_ESS, "Gaussian"))
                ],
                lines={"0.5": 0.5},
            ),
        ],
    )


def _at(step: float | None) -> str:
    return "never" if step is None else f"{step:g}"


def holds(results: Results) -> Verdict:
    """The arm named in the criterion stays within its floors at every mark, with few enough syncs."""
    want = results.experiment.criterion
    arms = [arm for arm in results.specs if arm != ON_POLICY]
    ratios = {arm: results.ratios(arm) for arm in arms}
    syncs = {arm: results.syncs(arm) for arm in arms}
    reverse = {arm: results.reverse(arm) for arm in arms}
    every = results.specs[ON_POLICY][0].steps - 1
    passed = {
        arm: max(r.high for r in ratios[arm].values()) <= want["floors"]
        and syncs[arm] <= want["largest_share_of_syncs"] * every
        for arm in arms
    }
    main = want["arm"]
    lines = [
        f"{arm}: at most {max(r.value for r in found.values()):.2f} floors (upper bound "
        f"{max(r.high for r in found.values()):.2f}) with {syncs[arm]:.1f} of {every} syncs, "
        f"at the last mark {_range(found[max(found)])} and the other way round {_range(reverse[arm])}"
        for arm, found in ratios.items()
    ]
    others = [arm for arm, good in passed.items() if good and arm != main]
    tail = f"; also within the criterion: {', '.join(others)}" if others else ""
    return Verdict(
        status="reproduced" if passed[main] else "not reproduced",
        text=f"judged: {main}. " + "; ".join(lines) + tail,
        numbers={
            arm: {
                "ratios": rounded(ratios[arm]),
                "reverse_at_last": bounds(reverse[arm]),
                "syncs": syncs[arm],
            }
            for arm in arms
        },
        figures=[ratio_figure(ratios, results.experiment.title), _frontier(ratios, syncs)],
    )


def _frontier(ratios: dict[str, dict[int, Ratio]], syncs: dict[str, float]) -> Figure:
    """Worst KL / floor of each arm against the syncs that it used."""
    points = []
    for arm, found in ratios.items():
        worst = max(found.values(), key=lambda r: r.value)
        points.append(Series(arm, [syncs[arm]], [worst.value], [worst.low], [worst.high]))
    return Figure(
        "Worst KL / floor against syncs used", "syncs of a run", "KL to on-policy / noise floor", points,
        lines={"two floors": 2.0},
    )  # fmt: skip


def order(results: Results) -> Verdict:
    """Arms within their floors at every mark, arms beyond them at the last one, and pairs of which the first
    is nearer to on-policy at the last mark."""
    want = results.experiment.criterion
    pairs, within, beyond = (want.get(key, []) for key in ("nearer", "within", "beyond"))
    ratios = {arm: results.ratios(arm) for arm in results.specs if arm != ON_POLICY}
    last = {arm: found[max(found)] for arm, found in ratios.items()}
    held = [max(r.high for r in ratios[arm].values()) <= want["floors"] for arm in within]
    held += [last[arm].low > want["floors"] for arm in beyond]
    held += [last[a].value < last[b].value for a, b in pairs]
    clear = [last[a].high < last[b].low or last[b].high < last[a].low for a, b in pairs]
    status: Status = "reproduced" if all(held) else "not reproduced"
    if all(held) and not all(clear):
        status = "inconclusive"
    return Verdict(
        status=status,
        text="at the last mark: "
        + "; ".join(f"{arm} {_range(r)}" for arm, r in last.items())
        + " floors; highest upper bound: "
        + "; ".join(f"{arm} {max(r.high for r in ratios[arm].values()):.2f}" for arm in last),
        numbers={arm: rounded(found) for arm, found in ratios.items()},
        figures=[ratio_figure(ratios, results.experiment.title)],
    )


def excess_norm(results: Results) -> Verdict:
    """|g_SC|^2 - |g_IS|^2 = c1 x + c2 x^2 with x = learning rate x steps, on the same stale batches."""
    arm = "stale"
    excess = results.column(arm, "excess/sc_sq") - results.column(arm, "excess/is_sq")
    rate = results.specs[arm][0].learning_rate
    x = rate * np.arange(excess.shape[1])
    upto = x <= rate * results.experiment.criterion["steps"]
    design = np.stack([x[upto], x[upto] ** 2], 1)

    def quadratic(rows: np.ndarray) -> float:
        return float(np.linalg.lstsq(design, rows.mean(0)[upto], rcond=None)[0][1])

    rng = np.random.default_rng(0)
    draws = [quadratic(excess[rng.integers(0, len(excess), len(excess))]) for _ in range(2000)]
    low, high = (float(v) for v in np.quantile(draws, [0.025, 0.975]))
    value = quadratic(excess)
    status: Status = "reproduced" if low > 0 else "not reproduced" if high < 0 else "inconclusive"
    fit = design @ np.linalg.lstsq(design, excess.mean(0)[upto], rcond=None)[0]
    steps = [float(s) for s in np.arange(excess.shape[1])[upto]]
    return Verdict(
        status=status,
        text=f"quadratic coefficient {value:.3g}, 95 % interval [{low:.3g}, {high:.3g}] over seeds",
        numbers={"c2": value, "low": low, "high": high},
        figures=[
            Figure(
                "Excess squared update norm of score centring over importance sampling",
                "optimiser steps since the sync",
                "|g_SC|^2 - |g_IS|^2",
                [
                    Series(
                        "measured", steps, excess.mean(0)[upto].tolist(),
                        excess.min(0)[upto].tolist(), excess.max(0)[upto].tolist(),
                    ),
                    Series("fit c1 x + c2 x^2", steps, fit.tolist()),
                ],
            )
        ],
    )  # fmt: skip


def side_by_side(results: Results) -> Verdict:
    """Methods under conditions (arms `condition/method`): worst KL / floor over the marks, and syncs."""
    want, floors = results.experiment.criterion, results.experiment.criterion["floors"]
    table = {arm: results.ratios(arm) for arm in results.specs if arm != ON_POLICY}
    conditions, methods = (list(dict.fromkeys(arm.split("/")[i] for arm in table)) for i in (0, 1))
    found = {m: [r for c in conditions for r in table[f"{c}/{m}"].values()] for m in methods}
    worst = {m: max(ratios, key=lambda r: r.value) for m, ratios in found.items()}
    within = [m for m, ratios in found.items() if all(r.high <= floors for r in ratios)]
    ranking = sorted(methods, key=lambda m: worst[m].value)
    status: Status = "not reproduced"
    if ranking[0] == want["method"]:
        status = "reproduced" if want["method"] in within else "inconclusive"
    return Verdict(
        status=status,
        text=(
            f"worst over conditions and marks: {'; '.join(f'{m} {_range(worst[m])}' for m in ranking)} floors"
            f"; within {floors:g} everywhere by its upper bound: {', '.join(within) or 'none'}"
        ),
        numbers={arm: {"ratios": rounded(r), "syncs": results.syncs(arm)} for arm, r in table.items()},
        figures=[
            ratio_figure({m: table[f"{c}/{m}"] for m in methods}, f"{results.experiment.title}: {c}")
            for c in conditions
        ],
    )


def _range(ratio: Ratio) -> str:
    return f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


ANALYSES: dict[str, Callable[[Results], Verdict]] = {
    "decomposition": decomposition,
    "departure": departure,
    "holds": holds,
    "order": order,
    "excess_norm": excess_norm,
    "hidden_collapse": hidden_collapse,
    "collapse_grid": collapse_grid,
    "side_by_side": side_by_side,
}
