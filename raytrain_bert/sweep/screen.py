"""The view of a sweep: a table of trials in a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raytrain_bert.progress.format import SCORES, amount, duration, score
from raytrain_bert.progress.screen import Screen
from raytrain_bert.sweep.records import FULL, Trial, best_of, ranking

STYLES = {"running": "cyan", "trained": "green", "stopped": "yellow", "failed": "red", "unfinished": "yellow"}
MOST_ROWS = 12
MOST_REASONS = 8
LONGEST_VALUE = 12
LONGEST_REASON = 160
FEWEST_OF_REASON = 20
"""Columns; where there are fewer, the reasons have no column."""
GAP = 2
WIDTH_IN_A_FILE = 200


@dataclass(frozen=True)
class Now:
    """Where a sweep stands."""

    trials: Sequence[Trial]
    keys: Sequence[str]
    metric: str
    total: int | None
    """Trials in all; None where a budget decides."""
    seconds: float
    """Of the search so far."""
    eta: float | None
    """Seconds to its end, as far as can be told."""
    unit: str = "epochs"


class SweepScreen(Screen):
    """Draws the trials of a sweep beside what a run's screen draws."""

    now: Now | None = None
    unit = "epochs"

    def watch(self) -> None:
        """Show the trials from now on, until the next phase or facts."""
        self._end_current()
        self._began = self._clock()
        self._phase = "searching"
        self._show(self._view)

    def trial_line(self, what: str, trial: Trial, metric: str, best: Trial | None) -> None:
        """Tell in a line that a trial has started, validated or ended; in a terminal the table tells most of it."""
        if self._redraws and what != "ended":
            return
        if what == "started":
            text = f"trial {trial.number} started: {sample_told(trial.sample)}"
        elif what == "reported":
            text = f"trial {trial.number} {self._at(trial.epoch, trial.step)}: {SCORES[metric]} {score(trial.score)}"
        else:
            text = f"trial {trial.number} {trial.status}"
            text += f" ({shortened(trial.why)})" if trial.why and trial.why != FULL else ""
            if trial.best_score is not None:
                at = self._at(trial.best_epoch, trial.best_step)
                text += f": {SCORES[metric]} {score(trial.best_score)} at {at}"
            text += f", {duration(trial.seconds)}"
        is_best = best is not None and best.number == trial.number and what != "started"
        if what == "reported":
            is_best = is_best and trial.step == trial.best_step
        self._print(Text(self._wrapped(text) + ("  best so far" if is_best else ""), style="bold" if is_best else ""))

    def results(self, now: Now) -> None:
        """The closing table of trials, best first, and under it the reasons that it has no room for."""
        self._end_current()
        self._print(Text(), always=True)
        trials = ranking(now.trials, now.metric)
        width = self._width() if self.console.is_tty else WIDTH_IN_A_FILE
        table = trials_table(trials, now, width, with_reasons=False)
        for line in self.console.render_lines(table, self.console.options.update(width=width), pad=False):
            self._print(Text("".join(segment.text for segment in line)), always=True)
        reasons = [trial for trial in trials if trial.why and trial.why != FULL]
        if reasons:
            self._print(Text(), always=True)
        for trial in reasons[:MOST_REASONS]:
            self._print(
                Text(self._wrapped(f"trial {trial.number} {trial.status}: {shortened(trial.why)}")), always=True
            )
        if len(reasons) > MOST_REASONS:
            self._print(Text(f"and {len(reasons) - MOST_REASONS} more, in trials.csv"), always=True)

    def _at(self, epoch: float | None, step: int | None) -> str:
        """A moment of a trial, in the unit of the sweep."""
        if self.unit == "steps" and step is not None:
            return f"step {step:,}"
        return "-" if epoch is None else f"epoch {epoch:.4g}"

    def last_rows(self, status: str, rows: Sequence[tuple[str, str]], label: str, command: str) -> None:
        """What the sweep came to, and what the user may run next; shown in every mode."""
        seconds = self._clock() - self._started
        style = "bold green" if status == "finished" else "bold"
        self._print(Text(), always=True)
        self._print(Text(f"{status} in {duration(seconds)}", style=style), always=True)
        self._print(Text(), always=True)
        for key, value in rows:
            self._row(key, value, always=True)
        self._row(label, "", always=True)
        self._print(Text(f"  {command}", style="bold"), always=True)

    def _view(self) -> RenderableType:
        if self.now is None:
            return Text("starting the first trials ...")
        now = self.now
        table = trials_table(shown(now), now, self._width())
        return Group(table, Text(), Text(footer(now), style="dim"))


def shown(now: Now) -> list[Trial]:
    """The trials that there is room for: the running ones, then the best, by number."""
    running = [trial for trial in now.trials if trial.status == "running"]
    others = [trial for trial in ranking(now.trials, now.metric) if trial.status != "running"]
    chosen = (running + others)[:MOST_ROWS]
    return sorted(chosen, key=lambda trial: trial.number)


def trials_table(trials: Sequence[Trial], now: Now, width: int, *, with_reasons: bool = True) -> Table:
    """One line a trial: number and status, scores, then as many settings and as much of the reason as have room."""
    best = best_of(now.trials, now.metric)
    moment = "step" if now.unit == "steps" else "epoch"
    columns: dict[str, list[str]] = {
        "trial": [f"{'*' if best is not None and best.number == t.number else ''}{t.number}" for t in trials],
        "status": [t.status for t in trials],
        moment: ["-" if (at := t.at(now.unit)) is None else f"{at:.6g}" for t in trials],
        now.metric: [score(t.score) for t in trials],
        "best": [score(t.best_score) for t in trials],
        "rows/s": ["-" if t.rows_per_second is None else amount(t.rows_per_second) for t in trials],
        "time": [duration(t.seconds) for t in trials],
    }
    room = width - sum(width_of(title, cells) for title, cells in columns.items())
    settings: dict[str, list[str]] = {}
    for key in now.keys:
        title, cells = key.rpartition(".")[2], [value_told(t.sample.get(key, "-")) for t in trials]
        room -= width_of(title, cells)
        if room < 0 and settings:
            break
        settings[key] = cells
    table = Table(box=None, pad_edge=False, header_style="dim", show_edge=False)
    order = {"trial": columns.pop("trial"), "status": columns.pop("status"), **settings, **columns}
    for title in order:
        justify: Any = "left" if title == "status" else "right"
        table.add_column(title.rpartition(".")[2], justify=justify, no_wrap=True)
    shows_reason = with_reasons and room >= FEWEST_OF_REASON
    if shows_reason:
        table.add_column("why", overflow="ellipsis", no_wrap=True, max_width=min(room - GAP, 60))
    for n, trial in enumerate(trials):
        row = [Text(cells[n]) for cells in order.values()]
        row[1].stylize(STYLES[trial.status])
        if shows_reason:
            row.append(Text("" if trial.why == FULL else trial.why))
        table.add_row(*row, style="bold" if order["trial"][n].startswith("*") else "")
    return table


def width_of(title: str, cells: Sequence[str]) -> int:
    """Columns of the terminal that a column of the table takes."""
    return max(len(text) for text in (title, *cells)) + GAP


def footer(now: Now) -> str:
    """How many trials are done, the best so far, and when it will be over."""
    return progress_told(now) + ("" if now.eta is None else f" · about {duration(now.eta)} left")


def progress_told(now: Now) -> str:
    """How many trials are done, and the best so far."""
    done = sum(trial.has_ended for trial in now.trials)
    running = sum(trial.status == "running" for trial in now.trials)
    words = [f"{done}{'' if now.total is None else f'/{now.total}'} trials done, {running} running"]
    best = best_of(now.trials, now.metric)
    if best is not None:
        words.append(f"best {SCORES[now.metric]} {score(best.best_score)} in trial {best.number}")
    return " · ".join([*words, duration(now.seconds)])


def sample_told(sample: dict[str, Any]) -> str:
    """The sampled values by their short names: learning_rate 3.2e-05, global_batch_size 16."""
    return ", ".join(f"{key.rpartition('.')[2]} {value_told(value)}" for key, value in sample.items()) or "as it is"


def shortened(text: str) -> str:
    """A reason that fits a line or two; trials.jsonl has it whole."""
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 3].rstrip() + "..."


def value_told(value: Any) -> str:
    """A value in a few characters."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.3g}"
    text = str(value)
    text = text.rpartition("/")[2] or text  # of a model folder or a hub name, the name
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


def estimate(trials: Sequence[Trial], total: int | None, concurrent: int, spent: dict[int, float]) -> float | None:
    """Seconds to the end, from the mean time of the trials that have ended; None before the first one has.

    Args:
        trials: all so far.
        total: number of trials; None where a budget decides.
        concurrent: trials at a time.
        spent: seconds of each running trial so far.
    """
    ended = [trial.seconds for trial in trials if trial.has_ended and trial.status != "failed"]
    if not ended or total is None:
        return None
    mean = sum(ended) / len(ended)
    left = mean * (total - len([trial for trial in trials if trial.has_ended])) - sum(
        min(seconds, mean) for seconds in spent.values()
    )
    return max(0.0, left / max(concurrent, 1))
