"""SWEEP/sweep.html: the sweep in a browser without any server; it reloads itself while the sweep runs."""

from __future__ import annotations

import html
import json
import math
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raytrain_bert.progress.format import SCORES, duration, score
from raytrain_bert.scores import METRICS
from raytrain_bert.sweep.importance import importances
from raytrain_bert.sweep.records import SweepFolder, Trial, best_of, ranking
from raytrain_bert.sweep.screen import Now, footer, value_told
from raytrain_bert.sweep.space import Space

SCRIPT = "plotly.min.js"
SECONDS_BETWEEN_PAGES = 3.0
RELOAD_SECONDS = 5
COLOURS = {"trained": "#2a7f62", "stopped": "#c98a1b", "failed": "#c0392b", "running": "#2f6fb3", "unfinished": "#888"}
HIGHLIGHT = "#d6336c"
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:1180px;padding:24px;color:#1c2330;background:#fff}
h1{font-size:22px;margin:0}h2{font-size:16px;margin:32px 0 4px}
.status{color:#59636e;margin:2px 0 14px}
.best{background:#f4f7fb;border-radius:8px;padding:10px 14px;display:inline-block}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
th{text-align:right;color:#59636e;font-weight:600;border-bottom:1px solid #d5dbe3;padding:4px 8px}
td{text-align:right;padding:4px 8px;border-bottom:1px solid #eef1f5;white-space:nowrap}
td.text,th.text{text-align:left;white-space:normal}
tr.best td{font-weight:700;background:#fdf1f5}
.dot{display:inline-block;width:9px;height:9px;border-radius:50%;margin-right:6px}
.note{color:#59636e;font-size:13px}
"""


@dataclass
class Page:
    """Writes the page, not more often than there is something new."""

    folder: SweepFolder
    space: Space
    name: str
    _written: float = -math.inf

    def update(self, now: Now, *, status: str = "running", always: bool = False, test: Any = None) -> None:
        """Write it, if the last one is old enough."""
        moment = time.monotonic()
        if not always and moment - self._written < SECONDS_BETWEEN_PAGES:
            return
        self._written = moment
        script = self.folder.path / SCRIPT
        if not script.exists():
            shutil.copyfile(_plotly_script(), script)
        text = render(self.folder, self.space, self.name, now, status, test)
        temporary = self.folder.page_path.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, self.folder.page_path)


def render(folder: SweepFolder, space: Space, name: str, now: Now, status: str, test: Any = None) -> str:
    """The whole page."""
    best = best_of(now.trials, now.metric)
    reload_tag = f'<meta http-equiv="refresh" content="{RELOAD_SECONDS}">' if status == "running" else ""
    parts = [
        f"<h1>{html.escape(name)}</h1>",
        f'<p class="status" id="status">{html.escape(status)} · {html.escape(footer(now))}</p>',
    ]
    if best is not None:
        parts.append(f'<p class="best" id="best">{_best_told(best, now.metric, test)}</p>')
    figures = _figures(folder, space, now, best)
    parts += [f"<h2>{html.escape(title)}</h2>{figure}" for title, figure in figures]
    parts += [f'<h2>Trials</h2><div class="wide">{_table(now, best)}</div>']
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{reload_tag}<title>{html.escape(name)}</title>'
        f'<style>{STYLE}</style><script src="{SCRIPT}"></script></head><body>{"".join(parts)}</body></html>\n'
    )


def _best_told(best: Trial, metric: str, test: Any) -> str:
    values = ", ".join(f"{html.escape(key)} <b>{html.escape(value_told(v))}</b>" for key, v in best.sample.items())
    told = f"best: trial {best.number}, validation {SCORES[metric]} <b>{score(best.best_score)}</b>"
    told += f" at epoch {best.best_epoch:g}" if best.best_epoch is not None else ""
    told += f" · {values}" if values else ""
    if test:
        scores = ", ".join(f"{label} <b>{score(test.get(key))}</b>" for key, label in SCORES.items())
        told += f"<br>test (once, by the final model): {scores}"
    return told


def _figures(folder: SweepFolder, space: Space, now: Now, best: Trial | None) -> list[tuple[str, str]]:
    scored = [trial for trial in now.trials if trial.best_score is not None and trial.status != "failed"]
    found = [("Learning curves", _curves(folder, now, best))]
    if len(scored) >= 2 and now.keys:
        found.insert(0, ("Settings and score of each trial", _parallel(scored, space, now)))
        found.append(("Score against each setting", _scatter(scored, space, now, best)))
    strengths = importances(scored, space, now.metric)
    if strengths:
        found.append(("What mattered", _bars(strengths)))
    return found


def _parallel(trials: Sequence[Trial], space: Space, now: Now) -> str:
    import plotly.graph_objects as go

    dimensions = [_dimension(key, [trial.sample.get(key) for trial in trials], space) for key in now.keys]
    scores = [trial.best_score for trial in trials]
    dimensions.append({"label": SCORES[now.metric], "values": scores})
    figure = go.Figure(
        go.Parcoords(
            line={
                "color": scores,
                "colorscale": "Viridis",
                "reversescale": METRICS[now.metric] == "min",
                "showscale": True,
            },
            dimensions=dimensions,
            labelfont={"size": 12},
        )
    )
    return _html(figure, "parallel", 360, {"l": 90, "r": 60, "t": 60, "b": 30})


def _dimension(key: str, values: list[Any], space: Space) -> dict[str, Any]:
    """One axis: numbers as they are (or their logarithm), all else by its place in a list; unset ones below."""
    label = key.rpartition(".")[2]
    numbers = [value for value in values if _is_number(value)]
    if numbers and all(value is None or _is_number(value) for value in values):
        log = _is_log(key, space) and min(numbers) > 0
        places = [math.log10(value) if log else value for value in numbers]
        low, high = min(places), max(places)
        gap = low - 0.15 * ((high - low) or 1.0)
        axis: dict[str, Any] = {
            "label": label,
            "values": [gap if v is None else math.log10(v) if log else v for v in values],
        }
        if log or None in values:
            ticks = [low + (high - low) * n / 4 for n in range(5)] if high > low else [low]
            axis["tickvals"] = ([gap] if None in values else []) + ticks
            axis["ticktext"] = (["unset"] if None in values else []) + [f"{10**t if log else t:.3g}" for t in ticks]
        return axis
    names = list(dict.fromkeys("unset" if value is None else value_told(value) for value in values))
    places_of = {name: place for place, name in enumerate(names)}
    return {
        "label": label,
        "values": [places_of["unset" if value is None else value_told(value)] for value in values],
        "tickvals": list(range(len(names))),
        "ticktext": names,
    }


def _curves(folder: SweepFolder, now: Now, best: Trial | None) -> str:
    import plotly.graph_objects as go

    figure = go.Figure()
    for trial in now.trials:
        points = [
            (record["epoch"], record.get(now.metric))
            for record in folder.trial(trial.number).records("validation")
            if record.get(now.metric) is not None
        ]
        if not points:
            continue
        is_best = best is not None and best.number == trial.number
        colour = HIGHLIGHT if is_best else COLOURS.get(trial.status, "#888")
        symbols = ["circle"] * len(points)
        sizes = [5] * len(points)
        if trial.status in ("stopped", "failed"):  # it ends here, before its time
            symbols[-1], sizes[-1] = "x", 11
        figure.add_trace(
            go.Scatter(
                x=[epoch for epoch, _ in points],
                y=[value for _, value in points],
                mode="lines+markers",
                name=f"{trial.number} {trial.status}",
                line={"color": colour, "width": 3 if is_best else 1.5},
                marker={"symbol": symbols, "size": sizes, "color": colour},
                hovertext=_hover(trial),
                hoverinfo="text+y",
            )
        )
    figure.update_layout(xaxis_title="epoch", yaxis_title=f"validation {SCORES[now.metric]}")
    return _html(figure, "curves", 380)


def _scatter(trials: Sequence[Trial], space: Space, now: Now, best: Trial | None) -> str:
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    columns = min(3, len(now.keys))
    rows = -(-len(now.keys) // columns)
    figure = make_subplots(rows=rows, cols=columns, shared_yaxes=True, horizontal_spacing=0.04)
    for index, key in enumerate(now.keys):
        there = [trial for trial in trials if key in trial.sample]
        values = [trial.sample[key] for trial in there]
        numeric = all(_is_number(value) for value in values)
        row, column = index // columns + 1, index % columns + 1
        figure.add_trace(
            go.Scatter(
                x=values if numeric else [value_told(value) for value in values],
                y=[trial.best_score for trial in there],
                mode="markers",
                showlegend=False,
                marker={
                    "size": 9,
                    "color": [
                        HIGHLIGHT if best is not None and t.number == best.number else COLOURS.get(t.status, "#888")
                        for t in there
                    ],
                },
                hovertext=[_hover(trial) for trial in there],
                hoverinfo="text+y",
            ),
            row=row,
            col=column,
        )
        figure.update_xaxes(title_text=key, row=row, col=column)
        if numeric and values and _is_log(key, space) and min(values) > 0:
            figure.update_xaxes(type="log", exponentformat="e", row=row, col=column)
    figure.update_yaxes(title_text=f"validation {SCORES[now.metric]}", col=1)
    return _html(figure, "scatter", 300 * rows + 40)


def _bars(strengths: dict[str, float]) -> str:
    import plotly.graph_objects as go

    ordered = sorted(strengths.items(), key=lambda item: item[1])
    figure = go.Figure(
        go.Bar(
            x=[value for _, value in ordered],
            y=[key for key, _ in ordered],
            orientation="h",
            marker={"color": "#2f6fb3"},
            text=[f"{value:.2f}" for _, value in ordered],
        )
    )
    figure.update_xaxes(range=[0, 1], title_text="strength of the relation to the score, 0 to 1")
    note = (
        '<p class="note">Rank correlation (Spearman) of numbers, correlation ratio of choices; each setting by itself, '
        "so a hint and no proof, above all with few trials.</p>"
    )
    return note + _html(figure, "importance", 70 + 40 * len(ordered), {"l": 220, "r": 30, "t": 10, "b": 60})


def _table(now: Now, best: Trial | None) -> str:
    head = ["trial", "status", *(key.rpartition(".")[2] for key in now.keys)]
    head += ["epoch", SCORES[now.metric], "best", "at epoch", "rows/s", "time", "why"]
    titles = ["", "", *now.keys, "", "", "", "", "", "", ""]
    cells = "".join(
        f'<th{" class=text" if name in ("status", "why") else ""} title="{html.escape(title)}">{html.escape(name)}</th>'
        for name, title in zip(head, titles, strict=True)
    )
    lines = [_line(trial, now, best) for trial in ranking(now.trials, now.metric)]
    return f'<table id="trials"><thead><tr>{cells}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def _line(trial: Trial, now: Now, best: Trial | None) -> str:
    is_best = best is not None and best.number == trial.number
    dot = f'<span class="dot" style="background:{COLOURS.get(trial.status, "#888")}"></span>'
    cells = [
        _cell("trial", trial.number, str(trial.number)),
        f'<td class="text" data-name="status">{dot}{html.escape(trial.status)}</td>',
        *(_cell(key, trial.sample.get(key), value_told(trial.sample.get(key, "-"))) for key in now.keys),
        _cell("epoch", trial.epoch, "-" if trial.epoch is None else f"{trial.epoch:.4g}"),
        _cell("score", trial.score, score(trial.score)),
        _cell("best_score", trial.best_score, score(trial.best_score)),
        _cell("best_epoch", trial.best_epoch, "-" if trial.best_epoch is None else f"{trial.best_epoch:.4g}"),
        _cell("rows_per_second", trial.rows_per_second, _speed(trial)),
        _cell("seconds", trial.seconds, duration(trial.seconds)),
        f'<td class="text" data-name="why">{html.escape(trial.why)}</td>',
    ]
    return f'<tr{" class=best" if is_best else ""} data-trial="{trial.number}">{"".join(cells)}</tr>'


def _cell(name: str, value: Any, shown: str) -> str:
    """A number as it is in `data-value`, and as people read it."""
    exact = "" if value is None else html.escape(json.dumps(value, ensure_ascii=False), quote=True)
    return f'<td data-name="{html.escape(name)}" data-value="{exact}">{html.escape(shown)}</td>'


def _speed(trial: Trial) -> str:
    return "-" if trial.rows_per_second is None else f"{trial.rows_per_second:,.1f}"


def _hover(trial: Trial) -> str:
    values = "<br>".join(f"{html.escape(k)} {html.escape(value_told(v))}" for k, v in trial.sample.items())
    return f"trial {trial.number}, {trial.status}<br>{values}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_log(key: str, space: Space) -> bool:
    """Whether a setting is drawn on a logarithmic axis: as it is searched, or where its list spans a decade."""
    for domain in space.domains:
        if domain.key == key:
            numbers = [value for value in domain.arguments if _is_number(value)]
            if domain.is_list:
                return len(numbers) > 1 and min(numbers) > 0 and max(numbers) / min(numbers) >= 10
            return domain.kind.endswith("loguniform")
    return False


def _html(figure: Any, name: str, height: int, margin: dict[str, int] | None = None) -> str:
    figure.update_layout(
        height=height,
        margin=margin or {"l": 60, "r": 20, "t": 10, "b": 45},
        template="plotly_white",
        font={"family": "system-ui, sans-serif", "size": 12},
    )
    text: str = figure.to_html(
        full_html=False, include_plotlyjs=False, div_id=name, config={"displayModeBar": False, "responsive": True}
    )
    return text


def _plotly_script() -> Path:
    import plotly

    return Path(plotly.__file__).parent / "package_data" / SCRIPT
