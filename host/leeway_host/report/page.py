"""The HTML page of a run's report: key figures, plots, resyncs, checks, metrics, configuration."""

from __future__ import annotations

import html
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

from leeway.checks.result import ORDER
from leeway.metrics import find_metric
from leeway.metrics.areas.reward import REWARD_MEAN
from leeway_host.report.plots import panels
from leeway_host.report.read import Run, read_run

FILE_NAME = "report.html"
ROW_FIELDS = {"step", "epoch", "time"}
"""Fields that identify a row of metrics.jsonl."""


def write_report(run_dir: str | Path) -> Path:
    """Write DIR/report.html from the run's metrics.jsonl, summary.json and config.yaml; returns its path.

    The page needs no network and names the files that are missing or cut off. Raises ReportError if the
    directory does not exist or is not a run's output directory.
    """
    run = read_run(run_dir)
    target = run.directory / FILE_NAME
    temporary = target.with_name(f".{FILE_NAME}.{os.getpid()}")
    temporary.write_text(build_page(run), encoding="utf-8")
    temporary.replace(target)
    return target


def build_page(run: Run) -> str:
    """The HTML of the whole page."""
    from plotly.offline import get_plotlyjs

    style = files("leeway_host.report").joinpath("report.css").read_text(encoding="utf-8")
    name = _text(run.summary.get("name") or run.config.get("name") or run.directory.name)
    plots = _build_plots(run)
    script = f"<script>{get_plotlyjs()}</script>" if plots else ""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{name} · Leeway</title><style>{style}</style>{script}</head><body>",
            _build_header(run, name),
            _build_notices(run),
            plots or '<p class="empty">No step was trained, so there is nothing to plot.</p>',
            _build_resyncs(run),
            _build_checks(run),
            _build_metrics(run),
            _build_config(run),
            "</body></html>",
        ]
    )


def summarise(run: Run) -> list[tuple[str, str]]:
    """The key figures at the top of the page: (label, value)."""
    summary = run.summary
    facts = [
        ("method", summary.get("method") or run.setting("correction", "method")),
        ("model", summary.get("model") or run.setting("model", "name")),
        ("seed", summary.get("seed", run.config.get("seed"))),
        ("steps", summary.get("steps", len(run.rows))),
        ("wall time", _duration(summary.get("wall_s"))),
        ("reward, first to last quarter", _reward_change(run)),
        ("resyncs", len(run.resyncs)),
        ("tokens generated", _count(summary.get("tokens_generated"))),
        ("tokens trained", _count(summary.get("tokens_trained"))),
        ("tokens voided", _count(summary.get("tokens_voided"))),
        ("samplers busy", _percent(summary.get("sampler_busy_fraction"))),
        ("trainer busy", _percent(summary.get("trainer_busy_fraction"))),
    ]
    return [(label, str(value)) for label, value in facts if value is not None]


def _build_header(run: Run, name: str) -> str:
    status = str(run.summary.get("status") or "no summary")
    kind = {"completed": "good", "no summary": "unknown"}.get(status, "bad")
    tiles = "".join(
        f'<div class="tile"><div class="value">{_text(value)}</div>'
        f'<div class="label">{_text(label)}</div></div>'
        for label, value in summarise(run)
    )
    return (
        f'<header><h1>{name}</h1><span class="status {kind}">{_text(status)}</span></header>'
        f'<section class="tiles">{tiles}</section>'
    )


def _build_notices(run: Run) -> str:
    notices = []
    if run.summary.get("error"):
        notices.append(f'<div class="notice bad"><pre>{_text(run.summary["error"])}</pre></div>')
    if run.problems:
        items = "".join(f"<li>{_text(problem)}</li>" for problem in run.problems)
        notices.append(f'<div class="notice"><ul>{items}</ul></div>')
    return "".join(notices)


def _build_plots(run: Run) -> str:
    cards = []
    for panel in panels():
        figure = panel.draw(run) if run.rows else None
        if figure is None:
            continue
        plot = figure.to_html(
            full_html=False,
            include_plotlyjs=False,
            div_id=f"plot-{panel.key}",
            config={"displayModeBar": False, "responsive": True},
        )
        cards.append(
            f'<article class="card"><h2>{_text(panel.title)}</h2><p>{_text(panel.note)}</p>{plot}</article>'
        )
    return f'<section class="plots">{"".join(cards)}</section>' if cards else ""


def _build_resyncs(run: Run) -> str:
    if not run.resyncs:
        return '<section class="card wide"><h2>Resyncs</h2><p>None.</p></section>'
    rows = "".join(
        "<tr>"
        + "".join(f"<td>{_cell(resync.get(key))}</td>" for key in ("step", "version", "reason", "ess"))
        + "</tr>"
        for resync in run.resyncs
    )
    head = "<tr><th>after step</th><th>new version</th><th>reason</th><th>ESS</th></tr>"
    return f'<section class="card wide"><h2>Resyncs</h2><table>{head}{rows}</table></section>'


def _build_checks(run: Run) -> str:
    if not run.checks:
        return '<section class="card wide"><h2>Checks</h2><p>None were recorded.</p></section>'
    worst = sorted((r.worst for r in run.checks.values()), key=lambda r: (-ORDER[r.status], r.name))
    shown = "".join(
        f"<tr><td>{_text(r.name)}</td><td>{_text(r.status)}</td><td>{_cell(r.value)}</td>"
        f"<td>{_cell(r.threshold)}</td><td>{_text(r.evidence)}</td></tr>"
        for r in worst
    )
    bad = sum(r.status != "ok" for r in worst)
    head = "<tr><th>check</th><th>status</th><th>value</th><th>limit</th><th>evidence</th></tr>"
    return (
        f'<section class="card wide"><h2>Checks</h2><details{" open" if bad else ""}>'
        f"<summary>{len(worst) - bad} of {len(worst)} ok</summary>"
        f"<table>{head}{shown}</table></details></section>"
    )


def _build_metrics(run: Run) -> str:
    """Every number that the run recorded, with the catalogue's unit and meaning."""
    rows = []
    for name in sorted({name for row in run.rows for name in row} - ROW_FIELDS):
        values = [value for value in run.column(name) if value is not None]
        if values:
            metric = find_metric(name)
            numbers = (values[0], values[-1], min(values), max(values))
            cells = [name, *(f"{value:.4g}" for value in numbers)]
            cells += [metric.unit, metric.help] if metric else ["", ""]
            rows.append("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in cells) + "</tr>")
    if not rows:
        return ""
    titles = ("metric", "first", "last", "lowest", "highest", "unit", "meaning")
    head = "<tr>" + "".join(f"<th>{title}</th>" for title in titles) + "</tr>"
    return (
        f'<section class="card wide"><h2>Metrics</h2><details><summary>{len(rows)} recorded</summary>'
        f"<table>{head}{''.join(rows)}</table></details></section>"
    )


def _build_config(run: Run) -> str:
    if not run.config_text:
        return ""
    return (
        '<section class="card wide"><h2>Configuration</h2>'
        "<details><summary>config.yaml, resolved</summary>"
        f"<pre>{_text(run.config_text)}</pre></details></section>"
    )


def _reward_change(run: Run) -> str | None:
    rewards = [value for value in run.column(REWARD_MEAN) if value is not None]
    if len(rewards) < 4:
        return None
    quarter = max(1, len(rewards) // 4)
    first, last = sum(rewards[:quarter]) / quarter, sum(rewards[-quarter:]) / quarter
    return f"{first:.3f} → {last:.3f}"


def _duration(seconds: Any) -> str | None:
    if not isinstance(seconds, int | float):
        return None
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _count(value: Any) -> str | None:
    return f"{value:,.0f}" if isinstance(value, int | float) else None


def _percent(value: Any) -> str | None:
    return f"{value:.0%}" if isinstance(value, int | float) else None


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else _text(value)


def _text(value: Any) -> str:
    return html.escape(str(value))
