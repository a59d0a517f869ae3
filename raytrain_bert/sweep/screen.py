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
from raytrain_bert.sweep.records import Trial, best_of, ranking

STYLES = {"running": "cyan", "trained": "green", "stopped": "yellow", "failed": "red", "unfinished": "yellow"}
MOST_ROWS = 12
LONGEST_VALUE = 12
LONGEST_REASON = 160


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
            text = f"trial {trial.number} epoch {trial.epoch:g}: {SCORES.get(metric, metric)} {score(trial.score)}"
        else:
            text = f"trial {trial.number} {trial.status}"
            text += f" ({shortened(trial.why)})" if trial.why and trial.why != "trained to the end" else ""
            text += f": {SCORES.get(metric, metric)} {score(trial.best_score)}" if trial.best_score is not None else ""
            text += f" at epoch {trial.best_epoch:g}" if trial.best_epoch is not None else ""
            text += f", {duration(trial.seconds)}"
        is_best = best is not None and best.number == trial.number and what != "started"
        if what == "reported":
            is_best = is_best and trial.step == trial.best_step
        self._print(Text(self._wrapped(text) + ("  best so far" if is_best else ""), style="bold" if is_best else ""))

    def results(self, now: Now, *, always: bool = True) -> None:
        """The closing table of trials, best first."""
        self._end_current()
        self._print(Text(), always=always)
        for line in self._lines(trials_table(ranking(now.trials, now.metric), now, None, most=10**6)):
            self._print(line, always=always)

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

    def _lines(self, table: Table) -> list[Text]:
        """A table as lines of text: also in a file, at a width that keeps them whole."""
        width = self._width() if self.console.is_tty else 200
        rendered = self.console.render_lines(table, self.console.options.update(width=width), pad=False)
        return [Text("".join(segment.text for segment in line)) for line in rendered]

    def _view(self) -> RenderableType:
        if self.now is None:
            return Text("starting the first trials ...")
        now = self.now
        return Group(trials_table(shown(now), now, self._width()), Text(), Text(footer(now), style="dim"))


def shown(now: Now) -> list[Trial]:
    """The trials that there is room for: the running ones, then the best, by number."""
    running = [trial for trial in now.trials if trial.status == "running"]
    others = [trial for trial in ranking(now.trials, now.metric) if trial.status != "running"]
    chosen = (running + others)[:MOST_ROWS]
    return sorted(chosen, key=lambda trial: trial.number)


def trials_table(trials: Sequence[Trial], now: Now, width: int | None, most: int = MOST_ROWS) -> Table:
    """One line a trial: status, sampled values, epoch, score, speed, time."""
    best = best_of(now.trials, now.metric)
    table = Table(box=None, pad_edge=False, header_style="dim", show_edge=False)
    table.add_column("trial", justify="right")
    table.add_column("status")
    # On a narrow terminal the last settings go first.
    room = len(now.keys) if width is None else max(1, (width - 70) // 15)
    keys = list(now.keys)[:room]
    for key in keys:
        table.add_column(key.rpartition(".")[2], justify="right", no_wrap=True)
    for title in ("epoch", now.metric, "best", "rows/s", "time"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("why", overflow="ellipsis", no_wrap=True, max_width=60)
    for trial in trials[:most]:
        is_best = best is not None and best.number == trial.number
        table.add_row(
            f"{'*' if is_best else ''}{trial.number}",
            Text(trial.status, style=STYLES.get(trial.status, "")),
            *(value_told(trial.sample.get(key, "-")) for key in keys),
            "-" if trial.epoch is None else f"{trial.epoch:.4g}",
            score(trial.score),
            score(trial.best_score),
            "-" if trial.rows_per_second is None else amount(trial.rows_per_second),
            duration(trial.seconds),
            "" if trial.why == "trained to the end" else trial.why,
            style="bold" if is_best else "",
        )
    return table


def footer(now: Now) -> str:
    """How many trials are done, the best so far, and when it will be over."""
    done = sum(trial.has_ended for trial in now.trials)
    running = sum(trial.status == "running" for trial in now.trials)
    words = [f"{done}{'' if now.total is None else f'/{now.total}'} trials done, {running} running"]
    best = best_of(now.trials, now.metric)
    if best is not None:
        words.append(f"best {now.metric} {score(best.best_score)} in trial {best.number}")
    words.append(duration(now.seconds))
    if now.eta is not None:
        words.append(f"about {duration(now.eta)} left")
    return " · ".join(words)


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
