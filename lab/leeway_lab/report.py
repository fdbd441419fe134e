"""Verdicts on disk, and the page that shows them: each claim with its figure, criterion and numbers."""

from __future__ import annotations

import html
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from leeway_lab.results import Verdict
from leeway_lab.spec import Experiment, experiments

COLOURS = ("#1f6feb", "#d1570b", "#1a7f37", "#8250df", "#bf3989", "#6e7781", "#9a6700", "#0a7ea4", "#cf222e")
STATUS_COLOURS = {"reproduced": "#1a7f37", "not reproduced": "#cf222e", "inconclusive": "#9a6700"}
STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1f2328}
h2{margin-top:2.5rem}.s{font-weight:600}
blockquote{color:#59636e;border-left:3px solid #d1d9e0;margin:0;padding-left:1rem}
table{border-collapse:collapse}td,th{border-bottom:1px solid #d1d9e0;padding:.3rem .8rem;text-align:left}
"""


def write_verdict(out: Path, experiment: Experiment, verdict: Verdict, seeds: int) -> Path:
    """Keep a verdict as JSON, with the criterion it was judged by."""
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
    """A plotly figure of a results.Figure as a dictionary."""
    import plotly.graph_objects as go

    built = go.Figure()
    for series, colour in zip(figure["series"], COLOURS * 3, strict=False):
        if series["low"] is not None:
            built.add_scatter(
                x=series["x"] + series["x"][::-1], y=series["high"] + series["low"][::-1], fill="toself",
                fillcolor=colour, opacity=0.15, line={"width": 0}, hoverinfo="skip", showlegend=False,
            )  # fmt: skip
        built.add_scatter(x=series["x"], y=series["y"], name=series["label"], line={"color": colour})
    for label, y in figure["lines"].items():
        built.add_hline(y=y, line_dash="dot", annotation_text=label)
    built.update_layout(
        title=figure["title"], xaxis_title=figure["x"], yaxis_title=figure["y"], template="plotly_white",
        yaxis_type="log" if figure["log_y"] else "linear",
        xaxis_type="log" if figure["log_x"] else "linear", height=420,
    )  # fmt: skip
    return built


def _write_png(figure: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    canvas, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    for series, colour in zip(figure["series"], COLOURS * 3, strict=False):
        axes.plot(series["x"], series["y"], color=colour, label=series["label"])
        if series["low"] is not None:
            axes.fill_between(
                series["x"], series["low"], series["high"], color=colour, alpha=0.15, linewidth=0
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
    axes.legend(fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    canvas.tight_layout()
    canvas.savefig(path)
    plt.close(canvas)
