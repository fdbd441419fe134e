"""The plots of a run's report: each draws a plotly figure, or nothing if the run has no such metric."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from leeway_host.report.read import Run

BLUE, ORANGE, GREEN, RED, GREY = "#2f6fdb", "#e07b21", "#2a9d62", "#c8374a", "#8a93a3"
STACK = ["#c4cad4", "#7aa5ec", "#2f6fdb", "#e3b27a", "#2a9d62", "#c8374a", "#8a63c9"]
HEIGHT_PX = 300


@dataclass(frozen=True)
class Panel:
    """One plot of the page."""

    key: str
    title: str
    note: str
    draw: Callable[[Run], Any]


def draw_reward(run: Run) -> Any:
    """Mean reward per step and its running mean."""
    if not run.has("reward/mean"):
        return None
    values = run.column("reward/mean")
    window = max(3, len(values) // 8)
    figure = _figure("reward")
    _line(figure, run, "batch mean", values, GREY, width=1, markers=True)
    _line(figure, run, f"mean of {window} steps", running_mean(values, window), BLUE, width=2.5)
    return figure


def draw_ess(run: Run) -> Any:
    """Token and sequence ESS with the threshold; resyncs as vertical lines with their reason."""
    if not run.has("lag/ess_tok"):
        return None
    figure = _figure("ESS / n")
    _line(figure, run, "token", run.column("lag/ess_tok"), BLUE, markers=True)
    _line(figure, run, "sequence", run.column("lag/ess_seq"), ORANGE, markers=True)
    _mark_resyncs(figure, run, reasons=True)
    if run.ess_threshold is not None:
        dash = {"color": RED, "width": 1.5, "dash": "dash"}
        figure.add_hline(y=run.ess_threshold, line=dash)
        _legend_only(figure, f"resync below {run.ess_threshold:g}", dash)
    figure.update_yaxes(range=[0, 1.08])
    return figure


def draw_lag_variance(run: Run) -> Any:
    """Variance of the log lag ratio over the run."""
    if not run.has("lag/var"):
        return None
    figure = _figure("variance of log lag ratio")
    _line(figure, run, "token", run.column("lag/var"), BLUE, markers=True)
    if run.has("lag/var_seq"):
        _line(figure, run, "sequence", run.column("lag/var_seq"), ORANGE, markers=True)
    _mark_resyncs(figure, run)
    _log_if_wide(figure, run, ["lag/var", "lag/var_seq"])
    return figure


def draw_prediction(run: Run) -> Any:
    """Measured ESS against exp(-variance), which holds for a Gaussian log ratio."""
    points = [
        ("token", BLUE, _pairs(run, "lag/var", "lag/ess_tok")),
        ("sequence", ORANGE, _pairs(run, "lag/var_seq", "lag/ess_seq")),
    ]
    if not any(pairs for _, _, pairs in points):
        return None
    figure = _figure("measured ESS / n", x_title="variance of log lag ratio")
    top = max(x for _, _, pairs in points for x, _ in pairs) or 1e-6
    grid = [top * 1.05 * i / 100 for i in range(101)]
    figure.add_scatter(
        x=grid,
        y=[math.exp(-x) for x in grid],
        name="exp(-variance)",
        mode="lines",
        line={"color": GREY, "dash": "dot", "width": 2},
    )
    for name, color, pairs in points:
        if pairs:
            figure.add_scatter(
                x=[x for x, _ in pairs],
                y=[y for _, y in pairs],
                name=name,
                mode="markers",
                marker={"color": color, "size": 7, "opacity": 0.75},
            )
    figure.update_layout(hovermode="closest")
    return figure


def draw_discrepancy(run: Run) -> Any:
    """Sampler against trainer on the same weights."""
    if not run.has("disc/abs_mean"):
        return None
    figure = _figure("nats per token")
    _line(figure, run, "mean |log pi_s - log mu|", run.column("disc/abs_mean"), BLUE, markers=True)
    if run.has("disc/kl"):
        kl = [value if value and value > 0 else None for value in run.column("disc/kl")]
        _line(figure, run, "KL", kl, ORANGE, markers=True)
    _mark_resyncs(figure, run)
    figure.update_yaxes(type="log", exponentformat="power", dtick=1)
    return figure


def draw_staleness(run: Run) -> Any:
    """Age of the sampler's weights, in optimiser steps."""
    if not run.has("lag/age"):
        return None
    figure = _figure("optimiser steps")
    _line(figure, run, "age of the sampler's weights", run.column("lag/age"), BLUE, shape="hv", markers=True)
    _mark_resyncs(figure, run)
    figure.update_yaxes(rangemode="tozero")
    return figure


def draw_clipping(run: Run) -> Any:
    """Share of tokens whose lag ratio is clipped."""
    if not run.has("lag/clip_fraction"):
        return None
    figure = _figure("share of tokens")
    _line(figure, run, "clipped", run.column("lag/clip_fraction"), BLUE, markers=True)
    _mark_resyncs(figure, run)
    figure.update_yaxes(rangemode="tozero")
    return figure


def draw_throughput(run: Run) -> Any:
    """Tokens per second of samplers and trainer."""
    if not (run.has("sampler/tokens_per_s") or run.has("trainer/tokens_per_s")):
        return None
    figure = _figure("tokens / s")
    _line(figure, run, "samplers", run.column("sampler/tokens_per_s"), ORANGE, markers=True)
    _line(figure, run, "trainer", run.column("trainer/tokens_per_s"), BLUE, markers=True)
    _log_if_wide(figure, run, ["sampler/tokens_per_s", "trainer/tokens_per_s"])
    return figure


def draw_length(run: Run) -> Any:
    """Mean response length."""
    if not run.has("response/length_mean"):
        return None
    figure = _figure("tokens")
    _line(figure, run, "mean response length", run.column("response/length_mean"), BLUE, markers=True)
    figure.update_yaxes(rangemode="tozero")
    figure.update_layout(showlegend=False)
    return figure


def draw_times(run: Run) -> Any:
    """Where the trainer's wall time goes."""
    names = sorted(
        {
            name
            for row in run.rows
            for name in row
            if name.startswith("time/") and name.endswith("_s") and name != "time/step_s"
        }
    )
    names = [name for name in names if any(value for value in run.column(name))]
    if not names:
        return None
    names.sort(key=lambda name: name != "time/wait_s")
    figure = _figure("seconds")
    for index, name in enumerate(names):
        figure.add_bar(
            x=_steps(run),
            y=run.column(name),
            name=name.removeprefix("time/").removesuffix("_s"),
            marker={"color": STACK[index % len(STACK)]},
        )
    figure.update_layout(barmode="stack", bargap=0.25)
    return figure


PANELS = [
    Panel(
        "reward", "Reward", "Mean over the batch; responses that could not be scored count too.", draw_reward
    ),
    Panel(
        "ess",
        "Effective sample size of the lag ratio",
        "Share of n. 1 after a resync; falls as the trainer moves away from the sampler's weights.",
        draw_ess,
    ),
    Panel("lag", "Lag variance", "Of log pi_theta - log pi_s on the sampled tokens.", draw_lag_variance),
    Panel(
        "prediction",
        "ESS against its Gaussian prediction",
        "Points below the curve: heavier tails than a Gaussian log ratio has.",
        draw_prediction,
    ),
    Panel(
        "discrepancy",
        "Engine discrepancy",
        "Sampler against trainer on the same tokens and weights; should not grow with training.",
        draw_discrepancy,
    ),
    Panel(
        "staleness", "Staleness", "How far the sampler's weights are behind the trainer's.", draw_staleness
    ),
    Panel("clipping", "Clipped tokens", "Tokens that the clip of the lag ratio holds back.", draw_clipping),
    Panel(
        "throughput",
        "Throughput",
        "Generated by all samplers; scored and trained by the trainer.",
        draw_throughput,
    ),
    Panel("length", "Response length", "Including the end-of-sequence token.", draw_length),
    Panel("times", "Trainer time per step", "Waiting for rollouts is grey.", draw_times),
]


def running_mean(values: list[float | None], window: int) -> list[float | None]:
    """Mean of the last `window` values up to each position, missing ones left out."""
    means: list[float | None] = []
    for end in range(1, len(values) + 1):
        recent = [value for value in values[max(0, end - window) : end] if value is not None]
        means.append(sum(recent) / len(recent) if recent else None)
    return means


def _figure(y_title: str, x_title: str = "step") -> Any:
    import plotly.graph_objects as go

    axis = {"gridcolor": "#eceff3", "linecolor": "#c9d0da", "zeroline": False, "title_font": {"size": 12}}
    figure = go.Figure()
    figure.update_layout(
        template="none",
        height=HEIGHT_PX,
        margin={"l": 62, "r": 14, "t": 34, "b": 44},
        font={"family": "system-ui, sans-serif", "size": 12, "color": "#28313f"},
        paper_bgcolor="white",
        plot_bgcolor="white",
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        hovermode="x unified",
        xaxis={**axis, "title": {"text": x_title}},
        yaxis={**axis, "title": {"text": y_title}},
    )
    return figure


def _steps(run: Run) -> list[int]:
    return [int(row["step"]) for row in run.rows]


def _line(
    figure: Any,
    run: Run,
    name: str,
    values: list[float | None],
    color: str,
    *,
    width: float = 2,
    shape: str = "linear",
    markers: bool = False,
) -> None:
    dense = len(run.rows) > 150
    figure.add_scatter(
        x=_steps(run),
        y=values,
        name=name,
        mode="lines+markers" if markers and not dense else "lines",
        line={"color": color, "width": width, "shape": shape},
        marker={"size": 5},
        hovertemplate="%{y:.4g}",
    )


def _mark_resyncs(figure: Any, run: Run, *, reasons: bool = False) -> None:
    """A thin line per resync, with its reason beside it if asked and while there is room."""
    resyncs = run.resyncs
    style = {"color": GREEN, "width": 1}
    for resync in resyncs:
        figure.add_vline(x=resync["step"], line=style, opacity=0.6)
        if reasons and len(resyncs) <= 25:
            figure.add_annotation(
                x=resync["step"],
                y=1,
                yref="y domain",
                text=str(resync.get("reason") or "?"),
                font={"size": 10, "color": GREEN},
                textangle=-90,
                showarrow=False,
                xanchor="right",
                yanchor="top",
            )
    if resyncs:
        _legend_only(figure, "resync", style)


def _legend_only(figure: Any, name: str, line: dict[str, Any]) -> None:
    figure.add_scatter(x=[None], y=[None], name=name, mode="lines", line=line)


def _pairs(run: Run, x_metric: str, y_metric: str) -> list[tuple[float, float]]:
    columns = zip(run.column(x_metric), run.column(y_metric), strict=True)
    return [(x, y) for x, y in columns if x is not None and y is not None]


def _log_if_wide(figure: Any, run: Run, metrics: list[str]) -> None:
    """A logarithmic axis where positive values span more than a factor of 30."""
    values = [value for metric in metrics for value in run.column(metric) if value is not None and value > 0]
    if values and max(values) > 30 * min(values):
        figure.update_yaxes(type="log", exponentformat="power", dtick=1)
    else:
        figure.update_yaxes(rangemode="tozero")
