"""Plotly figures in the style of the report: axes, lines over the steps, marks of resyncs."""

from __future__ import annotations

from typing import Any

from leeway_host.report.read import Run

BLUE, ORANGE, GREEN, RED, GREY = "#2f6fdb", "#e07b21", "#2a9d62", "#c8374a", "#8a93a3"
HEIGHT_PX = 300
MAX_STEPS_WITH_MARKERS = 150
MAX_RESYNCS_WITH_REASON = 25


def new_figure(y_title: str, x_title: str = "step") -> Any:
    """An empty figure."""
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


def steps_of(run: Run) -> list[int]:
    """Step of each row."""
    return [int(row["step"]) for row in run.rows]


def add_line(
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
    """Add one value per step as a line; markers only while there is room for them."""
    dense = len(run.rows) > MAX_STEPS_WITH_MARKERS
    figure.add_scatter(
        x=steps_of(run),
        y=values,
        name=name,
        mode="lines+markers" if markers and not dense else "lines",
        line={"color": color, "width": width, "shape": shape},
        marker={"size": 5},
        hovertemplate="%{y:.4g}",
    )


def mark_resyncs(figure: Any, run: Run, *, reasons: bool = False) -> None:
    """Add a thin vertical line per resync, with its reason if asked and while there is room."""
    resyncs = run.resyncs
    style = {"color": GREEN, "width": 1}
    for resync in resyncs:
        figure.add_vline(x=resync["step"], line=style, opacity=0.6)
        if reasons and len(resyncs) <= MAX_RESYNCS_WITH_REASON:
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
        add_legend_entry(figure, "resync", style)


def add_legend_entry(figure: Any, name: str, line: dict[str, Any]) -> None:
    """Add an entry to the legend for a line that is not a trace."""
    figure.add_scatter(x=[None], y=[None], name=name, mode="lines", line=line)


def scale_y_axis(figure: Any, run: Run, metrics: list[str]) -> None:
    """Logarithmic y axis if the positive values span more than a factor of 30, otherwise from zero."""
    values = [value for metric in metrics for value in run.column(metric) if value is not None and value > 0]
    if values and max(values) > 30 * min(values):
        figure.update_yaxes(type="log", exponentformat="power", dtick=1)
    else:
        figure.update_yaxes(rangemode="tozero")
