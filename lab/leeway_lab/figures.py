"""Figures of the lab: measured lines with their intervals, for the page and as images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLOURS = ("#1f6feb", "#d1570b", "#1a7f37", "#8250df", "#bf3989", "#6e7781", "#9a6700", "#0a7ea4", "#cf222e")
FEW = 3
"""Maximum number of lines with bands; more would hide each other."""


def build_figure(figure: dict[str, Any]) -> Any:
    """A plotly figure of a results.Figure as a dictionary. Bands for a few lines, error bars for many."""
    import plotly.graph_objects as go

    built = go.Figure()
    bands = len(figure["series"]) <= FEW
    for number, series in enumerate(figure["series"]):
        colour, dash = _style(number)
        bars = None
        if series["low"] is not None and bands:
            built.add_scatter(
                x=series["x"] + series["x"][::-1], y=series["high"] + series["low"][::-1], fill="toself",
                fillcolor=colour, opacity=0.15, line={"width": 0}, hoverinfo="skip", showlegend=False,
            )  # fmt: skip
        elif series["low"] is not None:
            up, down = _distances(series)
            bars = {"array": up, "arrayminus": down, "thickness": 1, "width": 2}
        built.add_scatter(
            x=series["x"], y=series["y"], name=series["label"], mode="lines+markers", error_y=bars,
            line={"color": colour, "dash": dash}, marker={"size": 9 if len(series["x"]) == 1 else 4},
        )  # fmt: skip
    for label, y in figure["lines"].items():
        built.add_hline(y=y, line_dash="dot", annotation_text=label)
    built.update_layout(
        title=figure["title"], xaxis_title=figure["x"], yaxis_title=figure["y"], template="plotly_white",
        yaxis_type="log" if figure["log_y"] else "linear",
        xaxis_type="log" if figure["log_x"] else "linear", height=420,
    )  # fmt: skip
    return built


def _style(number: int) -> tuple[str, str]:
    """Colour and plotly's name of the dash of the nth series."""
    return COLOURS[number % len(COLOURS)], ("solid", "dash", "dot")[number // len(COLOURS) % 3]


def _distances(series: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Error bars from each point to its upper and lower bound."""
    up = [max(0.0, high - y) for high, y in zip(series["high"], series["y"], strict=True)]
    return up, [max(0.0, y - low) for low, y in zip(series["low"], series["y"], strict=True)]


def write_png(figure: dict[str, Any], path: Path) -> None:
    """The same figure as an image."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogFormatter

    path.parent.mkdir(parents=True, exist_ok=True)
    canvas, axes = plt.subplots(figsize=(9, 4.5), dpi=120)
    bands = len(figure["series"]) <= FEW
    for number, series in enumerate(figure["series"]):
        colour, dash = _style(number)
        style = {"solid": "-", "dash": "--", "dot": ":"}[dash]
        marker = "o" if len(series["x"]) == 1 else "."
        axes.plot(series["x"], series["y"], style, color=colour, marker=marker, label=series["label"])
        if series["low"] is not None and bands:
            axes.fill_between(
                series["x"], series["low"], series["high"], color=colour, alpha=0.15, linewidth=0
            )
        elif series["low"] is not None:
            up, down = _distances(series)
            axes.errorbar(
                series["x"], series["y"], [down, up], fmt="none", ecolor=colour, elinewidth=0.7, capsize=2
            )
    for label, y in figure["lines"].items():
        axes.axhline(y, linestyle=":", color="#59636e")
        axes.annotate(label, (0.99, y), xycoords=("axes fraction", "data"), ha="right", va="bottom")
    axes.set(
        title=figure["title"],
        xlabel=figure["x"],
        ylabel=figure["y"],
        xscale="log" if figure["log_x"] else "linear",
        yscale="log" if figure["log_y"] else "linear",
    )
    if figure["log_y"]:
        axes.yaxis.set_major_formatter(LogFormatter())
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    canvas.savefig(path, bbox_inches="tight")
    plt.close(canvas)
