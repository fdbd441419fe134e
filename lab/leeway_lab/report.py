"""Stores verdicts and writes the page that shows each claim with its figure, criterion and numbers."""

from __future__ import annotations

import html
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from leeway_lab.figures import build_figure, write_png
from leeway_lab.results import Verdict
from leeway_lab.spec import Experiment, experiments

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
            write_png(figure, out / "figures" / f"{data['experiment']}-{number + 1}.png")
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
