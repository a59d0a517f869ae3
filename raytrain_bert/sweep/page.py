"""SWEEP/sweep.html: the sweep in a browser without any server; it reloads itself while the sweep runs."""

from __future__ import annotations

import functools
import json
import math
import shlex
import shutil
import time
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

from raytrain_bert.progress.format import SCORES, amount, duration, score
from raytrain_bert.sweep.figures import COLOURS, sections_of
from raytrain_bert.sweep.records import SweepFolder, Trial, best_of, ranking, replace_file
from raytrain_bert.sweep.screen import Now, progress_told, value_told
from raytrain_bert.sweep.space import Space

SCRIPT = "plotly.min.js"
SECONDS_BETWEEN_PAGES = 3.0
SECONDS_BETWEEN_SIGNS = 15.0
"""While the sweep runs the page is written that often, even if nothing is new: its age tells whether it still runs."""
STALE_SECONDS = 60
RELOAD_SECONDS = 5
FINISHING = "finishing the winner"


@dataclass
class Page:
    """Writes the page, not more often than there is something new."""

    folder: SweepFolder
    space: Space
    name: str
    _written: float = -math.inf

    def update(
        self, now: Now, *, news: bool = True, status: str = "running", always: bool = False, test: Any = None
    ) -> None:
        """Write it, if the last one is old enough."""
        moment = time.monotonic()
        if not always and moment - self._written < (SECONDS_BETWEEN_PAGES if news else SECONDS_BETWEEN_SIGNS):
            return
        self._written = moment
        script = self.folder.path / SCRIPT
        if not script.exists():
            shutil.copyfile(_plotly_script(), script)
        replace_file(self.folder.page_path, render(self.folder, self.space, self.name, now, status, test))


def render(folder: SweepFolder, space: Space, name: str, now: Now, status: str, test: Any = None) -> str:
    """The whole page."""
    best = best_of(now.trials, now.metric)
    sections = sections_of(folder, space, now)
    figures = {figure.name: figure.content for section in sections for figure in section.figures}
    written = time.time()
    text: str = _template().render(
        name=name,
        status=status,
        running=status == "running",
        reloads=status in ("running", FINISHING),
        progress=progress_told(now),
        eta=None if now.eta is None else duration(now.eta),
        updated=f"{written:.0f}",
        updated_at=f"{datetime.fromtimestamp(written):%Y-%m-%d %H:%M:%S}",
        reload_seconds=RELOAD_SECONDS,
        stale_seconds=STALE_SECONDS,
        resume=shlex.quote(str(folder.path)),
        script=SCRIPT,
        style=_style(),
        metric=SCORES[now.metric],
        best=None if best is None else _best(best, now),
        test=[(label, score(test.get(key))) for key, label in SCORES.items()] if test else None,
        sections=sections,
        figures=figures,
        columns=_columns(now),
        rows=[_row(trial, now, best) for trial in ranking(now.trials, now.metric)],
    )
    return text


def _best(best: Trial, now: Now) -> dict[str, Any]:
    return {
        "number": best.number,
        "score": score(best.best_score),
        "at": f"{_moment(now)} {best.best_at(now.unit):.6g}",
        "sample": [(key, value_told(value)) for key, value in best.sample.items()],
    }


def _columns(now: Now) -> list[dict[str, Any]]:
    names = ["trial", "status", *now.keys, _moment(now), SCORES[now.metric], "best", f"at {_moment(now)}", "rows/s"]
    names += ["time", "why"]
    return [
        {"name": name.rpartition(".")[2] or name, "title": name, "is_text": name in ("status", "why")} for name in names
    ]


def _row(trial: Trial, now: Now, best: Trial | None) -> dict[str, Any]:
    at, best_at = trial.at(now.unit), trial.best_at(now.unit)
    speed = trial.rows_per_second
    cells = [
        _cell("trial", trial.number, str(trial.number)),
        _cell("status", trial.status, trial.status) | {"is_text": True, "colour": COLOURS[trial.status]},
        *(_cell(key, trial.sample.get(key), value_told(trial.sample.get(key, "-"))) for key in now.keys),
        _cell(_moment(now), at, "-" if at is None else f"{at:.6g}"),
        _cell("score", trial.score, score(trial.score)),
        _cell("best_score", trial.best_score, score(trial.best_score)),
        _cell(f"best_{_moment(now)}", best_at, "-" if best_at is None else f"{best_at:.6g}"),
        _cell("rows_per_second", speed, "-" if speed is None else amount(speed)),
        _cell("seconds", trial.seconds, duration(trial.seconds)),
        _cell("why", trial.why, trial.why) | {"is_text": True},
    ]
    return {"number": trial.number, "is_best": best is not None and best.number == trial.number, "cells": cells}


def _cell(name: str, value: Any, shown: str) -> dict[str, Any]:
    """A value as it is, in JSON, and as people read it."""
    exact = "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return {"name": name, "exact": exact, "shown": shown, "is_text": False, "colour": None}


def _moment(now: Now) -> str:
    return "step" if now.unit == "steps" else "epoch"


@functools.cache
def _template() -> Any:
    import jinja2

    text = resources.files("raytrain_bert.sweep").joinpath("page.html").read_text(encoding="utf-8")
    return jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(text)


@functools.cache
def _style() -> Any:
    from markupsafe import Markup

    return Markup(resources.files("raytrain_bert.sweep").joinpath("page.css").read_text(encoding="utf-8"))


def _plotly_script() -> Path:
    import plotly

    return Path(plotly.__file__).parent / "package_data" / SCRIPT
