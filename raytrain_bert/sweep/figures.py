"""The figures of a sweep's page: plotly's, as plain data that its script draws."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raytrain_bert.progress.format import SCORES
from raytrain_bert.scores import METRICS
from raytrain_bert.sweep.importance import importances
from raytrain_bert.sweep.records import SweepFolder, Trial, best_of
from raytrain_bert.sweep.screen import Now, value_told
from raytrain_bert.sweep.space import Domain, Space

COLOURS = {
    "trained": "#2a9d74",
    "stopped": "#c98a1b",
    "failed": "#d1495b",
    "running": "#3b82c4",
    "unfinished": "#8a8f98",
}
HIGHLIGHT = "#d6336c"
PIXELS_AN_AXIS = 140
MOST_TICKS = 12
BARS = "#3b82c4"
IMPORTANCE_NOTE = (
    "Rank correlation (Spearman) of numbers, correlation ratio of choices; each setting by itself, so a hint and no "
    "proof, above all with few trials."
)


@dataclass(frozen=True)
class Figure:
    """One plot."""

    name: str
    """Id of its element."""
    height: int
    """In pixels; its width is that of the page."""
    content: Mapping[str, Any]
    """data and layout, as plotly.js takes them."""
    narrowest: int = 0
    """In pixels; on a narrower page it is scrolled."""


@dataclass(frozen=True)
class Section:
    """Plots under one heading."""

    title: str
    figures: Sequence[Figure]
    kind: str = "single"
    """How they are laid out (page.css): single, parallel, or small ones side by side."""
    note: str = ""


def sections_of(folder: SweepFolder, space: Space, now: Now) -> list[Section]:
    """Everything that can be drawn of the trials so far."""
    best = best_of(now.trials, now.metric)
    scored = [trial for trial in now.trials if trial.best_score is not None and trial.status != "failed"]
    found = []
    if len(scored) >= 2 and now.keys:
        found.append(Section("Settings and score of each trial", [parallel(scored, space, now)], "parallel"))
    curves = learning_curves(folder, now, best)
    found.append(Section("Learning curves", [curves] if curves else [], note="" if curves else "No validation yet."))
    if len(scored) >= 2 and now.keys:
        found.append(Section("Score against each setting", scatter(scored, space, now, best), "small"))
    strengths = importances(scored, space, now.metric)
    if strengths:
        found.append(Section("What mattered", [bars(strengths)], note=IMPORTANCE_NOTE))
    return found


def parallel(trials: Sequence[Trial], space: Space, now: Now) -> Figure:
    """Parallel coordinates: a line for each trial, coloured by its score."""
    import plotly.graph_objects as go

    domains = {domain.key: domain for domain in space.domains}
    dimensions = [parallel_axis(domains[key], [trial.sample.get(key) for trial in trials]) for key in now.keys]
    scores = [trial.best_score for trial in trials]
    dimensions.append({"label": SCORES[now.metric], "values": scores})
    line = {"color": scores, "colorscale": "Viridis", "showscale": True}
    line["reversescale"] = METRICS[now.metric] == "min"
    plot = go.Figure(go.Parcoords(line=line, dimensions=dimensions, labelfont={"size": 12}))
    margin = {"l": 90, "r": 60, "t": 60, "b": 30}
    return replace(_figure("parallel", 360, plot, margin), narrowest=PIXELS_AN_AXIS * len(dimensions))


def parallel_axis(domain: Domain, values: Sequence[Any]) -> dict[str, Any]:
    """One axis of the parallel coordinates, as long as the domain; unset values (None) lie below its lower end."""
    label = domain.key.rpartition(".")[2]
    unset = None in values
    if domain.is_list:
        names = [value_told(value) for value in domain.arguments]
        places = [domain.arguments.index(value) if value in domain.arguments else -1 for value in values]
        ticks = list(range(len(names)))
        below = -1 in places
        return {
            "label": label,
            "values": places,
            "range": [-1.3 if below else -0.3, len(names) - 0.7],
            "tickvals": ([-1] if below else []) + ticks,
            "ticktext": (["unset"] if below else []) + names,
        }
    low, high = ends_of(domain, values)
    if is_log(domain):
        low, high = math.log10(low), math.log10(high)
        values = [None if value is None else math.log10(value) for value in values]
    gap = low - 0.15 * (high - low)
    quarters = [low + (high - low) * n / 4 for n in range(5)]
    return {
        "label": label,
        "values": [gap if value is None else value for value in values],
        "range": [gap if unset else low, high],
        "tickvals": ([gap] if unset else []) + quarters,
        "ticktext": (["unset"] if unset else []) + [f"{10**t if is_log(domain) else t:.3g}" for t in quarters],
    }


def learning_curves(folder: SweepFolder, now: Now, best: Trial | None) -> Figure | None:
    """Score after each validation of each trial; None before the first one."""
    import plotly.graph_objects as go

    moment = "step" if now.unit == "steps" else "epoch"
    plot = go.Figure()
    named: set[str] = set()
    for trial in now.trials:
        points = [
            (record[moment], record[now.metric])
            for record in folder.trial(trial.number).records("validation")
            if record.get(now.metric) is not None
        ]
        if not points:
            continue
        is_best = best is not None and best.number == trial.number
        group = f"best: trial {trial.number}" if is_best else trial.status
        colour = HIGHLIGHT if is_best else COLOURS[trial.status]
        # One validation is a point and no line: it must be seen all the same.
        symbols, sizes = ["circle"] * len(points), [10 if len(points) == 1 else 5] * len(points)
        if trial.status in ("stopped", "failed"):  # it ends here, before its time
            symbols[-1], sizes[-1] = "x", 11
        plot.add_trace(
            go.Scatter(
                x=[at for at, _ in points],
                y=[value for _, value in points],
                mode="lines+markers",
                name=group,
                legendgroup=group,
                showlegend=group not in named,
                line={"color": colour, "width": 3 if is_best else 1.5},
                marker={"symbol": symbols, "size": sizes, "color": colour},
                hovertext=hover(trial),
                hoverinfo="text+y",
                meta={"trial": trial.number},
            )
        )
        named.add(group)
    if not named:
        return None
    plot.update_layout(
        xaxis_title=moment,
        yaxis_title=f"validation {SCORES[now.metric]}",
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        showlegend=True,
    )
    furthest = max(max(trace.x) for trace in plot.data)
    plot.update_xaxes(rangemode="tozero", dtick=1 if moment == "epoch" and furthest <= MOST_TICKS else None)
    return _figure("curves", 380, plot)


def scatter(trials: Sequence[Trial], space: Space, now: Now, best: Trial | None) -> list[Figure]:
    """Score against each setting, a small plot for each."""
    import plotly.graph_objects as go

    scores = [trial.best_score for trial in trials if trial.best_score is not None]
    margin = 0.06 * ((max(scores) - min(scores)) or 1.0)
    figures = []
    for number, domain in enumerate(space.domains):
        there = [trial for trial in trials if domain.key in trial.sample]
        values = [trial.sample[domain.key] for trial in there]
        plot = go.Figure(
            go.Scatter(
                x=[value_told(value) for value in values] if domain.is_list else values,
                y=[trial.best_score for trial in there],
                mode="markers",
                showlegend=False,
                marker={
                    "size": 9,
                    "color": [
                        HIGHLIGHT if best is not None and trial.number == best.number else COLOURS[trial.status]
                        for trial in there
                    ],
                },
                hovertext=[hover(trial) for trial in there],
                hoverinfo="text+y",
            )
        )
        plot.update_xaxes(title_text=domain.key)
        if domain.is_list:
            names = [value_told(value) for value in domain.arguments]
            plot.update_xaxes(type="category", categoryarray=names, range=[-0.5, len(names) - 0.5])
            plot.update_xaxes(tickvals=names)
        else:
            low, high = ends_of(domain, values)
            edges = [math.log10(low), math.log10(high)] if is_log(domain) else [low, high]
            pad = 0.04 * (edges[1] - edges[0])
            plot.update_xaxes(range=[edges[0] - pad, edges[1] + pad])
            if is_log(domain):
                plot.update_xaxes(type="log", exponentformat="e", dtick=1 if edges[1] - edges[0] > 1.5 else None)
        plot.update_yaxes(
            title_text=f"validation {SCORES[now.metric]}", range=[min(scores) - margin, max(scores) + margin]
        )
        figures.append(_figure(f"scatter-{number}", 300, plot))
    return figures


def bars(strengths: Mapping[str, float]) -> Figure:
    """How strongly each setting goes with the score."""
    import plotly.graph_objects as go

    ordered = sorted(strengths.items(), key=lambda item: item[1])
    plot = go.Figure(
        go.Bar(
            x=[value for _, value in ordered],
            y=[key.rpartition(".")[2] for key, _ in ordered],
            orientation="h",
            marker={"color": BARS},
            text=[f"{value:.2f}" for _, value in ordered],
        )
    )
    plot.update_xaxes(range=[0, 1], title_text="strength of the relation to the score")
    return _figure("importance", 80 + 36 * len(ordered), plot)


def hover(trial: Trial) -> str:
    """What is told of a trial under the pointer."""
    values = "<br>".join(f"{html.escape(key)} {html.escape(value_told(value))}" for key, value in trial.sample.items())
    return f"trial {trial.number}, {trial.status}<br>{values}"


def is_log(domain: Domain) -> bool:
    """Whether it is drawn on a logarithmic axis: as it is searched."""
    return domain.kind.endswith("loguniform")


def ends_of(domain: Domain, values: Sequence[Any]) -> tuple[float, float]:
    """The ends of an interval, widened where pbt has moved a value out of it."""
    low, high = domain.arguments[0], domain.arguments[1]
    there = [value for value in values if value is not None]
    return min([low, *there]), max([high, *there])


def _figure(name: str, height: int, plot: Any, margin: Mapping[str, int] | None = None) -> Figure:
    plot.update_layout(
        margin=margin or {"l": 60, "r": 20, "t": 10, "b": 45},
        template="none",
        font={"family": "system-ui, sans-serif", "size": 12},
    )
    return Figure(name, height, json.loads(plot.to_json()))
