"""Stores verdicts and writes the page that shows each claim with its figure, criterion and numbers."""

from __future__ import annotations

import html
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from leeway_lab.results import Verdict
from leeway_lab.spec import Experiment, experiments

COLOURS = ("#1f6feb", "#d1570b", "#1a7f37", "#8250df", "#bf3989", "#6e7781", "#9a6700", "#0a7ea4", "#cf222e")
FEW = 3
"""Maximum number of lines with bands; more would hide each other."""
STATUS_COLOURS = {"reproduced": "#1a7f37", "not reproduced": "#cf222e", "inconclusive": "#9a6700"}
STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1f2328}
h2{margin-top:2.5rem}.s{font-weight:600}
blockquote{color:#59636e;border-left:3px solid #d1d9e0;margin:0;padding-left:1rem}
table{border-collapse:collapse}td,th{border-bottom:1px solid #d1d9e0;padding:.3rem .8rem;text-align:left}
"""


def write_verdict(out: Path, experiment: Experiment, verdict: Verdict, seeds: int) -> Path:
    """Store a verdict as JSON, with its criterion."""
    path = out / "verdicts" / f"{experiment.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {
        "experiment": experiment.name,
        "version": experiment.version,
        "title": experiment.title,
        "claim": experiment.claim.strip(),
        "criterion": experiment.criterion,
        "seeds": seeds,
        **asdict(verdict),
    }
    path.write_text(json.dumps(data, indent=1) + "\n")
    return path


def write_report(out: Path) -> Path:
    """Write out/report.html (self-contained), a PNG per figure in out/figures, and the table of verdicts as
    out/report.md; returns the page."""
    found = {path.stem: json.loads(path.read_text()) for path in (out / "verdicts").glob("*.json")}
    ordered = [found[name] for name in experiments() if name in found]
    parts, first = [], True
    for data in ordered:
        figures = []
        for number, figure in enumerate(data["figures"]):
            built = build_figure(figure)
            figures.append(built.to_html(full_html=False, include_plotlyjs=first))
            first = False
            _write_png(figure, out / "figures" / f"{data['experiment']}-{number + 1}.png")
        parts.append(_section(data, figures))
    rows = "".join(
        f'<tr><td><a href="#{d["experiment"]}">{html.escape(d["title"])}</a></td><td class="s" style="color:'
        f'{STATUS_COLOURS[d["status"]]}">{d["status"]}</td><td>{d["seeds"]}</td></tr>'
        for d in ordered
    )
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Leeway lab</title><style>{STYLE}</style>"
        f"<h1>The article's findings on a tiny model</h1><table><tr><th>finding</th><th>verdict</th>"
        f"<th>seeds</th></tr>{rows}</table>{''.join(parts)}</html>"
    )
    (out / "report.md").write_text(_table(ordered))
    path = out / "report.html"
    path.write_text(page)
    return path


def _table(ordered: list[dict[str, Any]]) -> str:
    rows = [f"| {d['title']} | {d['status']} | {d['text']} | {d['seeds']} |" for d in ordered]
    return "\n".join(["| finding | verdict | measured | seeds |", "|---|---|---|---|", *rows]) + "\n"


def _section(data: dict[str, Any], figures: list[str]) -> str:
    return (
        f'<h2 id="{data["experiment"]}">{html.escape(data["title"])}</h2>'
        f"<blockquote>{html.escape(data['claim'])}</blockquote>"
        f'<p><span class="s" style="color:{STATUS_COLOURS[data["status"]]}">{data["status"]}</span>: '
        f"{html.escape(data['text'])}</p><p>Criterion (version {data['version']}): "
        f"{html.escape(data['criterion']['text'].strip())}</p>{''.join(figures)}"
    )


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


def _write_png(figure: dict[str, Any], path: Path) -> None:
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
