"""How training looks: the bar, its figures, the line of a validation."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from raytrain_bert.progress.events import Evaluating, Steps, Validation
from raytrain_bert.progress.format import SCORES, amount, duration, epoch_of, fit, rows_of, score
from raytrain_bert.progress.meter import Meter

NARROWEST_BAR = 8
SECONDS_WITHOUT_NEWS = 10
EVALUATING = {"validation": "validating", "test": "testing"}


class TrainingView:
    """What is known about training, and its texts for a given width (None: as long as they get)."""

    def __init__(self, *, verbose: bool) -> None:
        """Know nothing yet."""
        self.meter = Meter()
        self.total_steps = 0
        self.num_epochs: int | None = None
        self.best_metric = "accuracy"
        self.evaluating: Evaluating | None = None
        self.last_news = 0.0
        """When the last event came."""
        self._last: Steps | None = None
        self._verbose = verbose

    def add(self, event: Steps, now: float) -> None:
        """Take in steps; the event holds one at least."""
        self.total_steps = event["total_steps"]
        self.meter.add_steps(event["records"], event["seconds"])
        self._last, self.last_news, self.evaluating = event, now, None

    @property
    def fraction(self) -> float:
        """Share of the steps that are done."""
        return self.meter.step / max(self.total_steps, 1)

    def line(self, width: int | None) -> str:
        """Position and figures in one line."""
        return fit([(self._epoch(), 0), (self._step(), 0), *self._figures()], width)

    def render(self, width: int, now: float, ascii_only: bool) -> RenderableType:
        """Two lines, neither wider than the terminal."""
        epoch, step = self._epoch(), self._step()
        room = width - len(epoch) - len(step) - 4
        if room < NARROWEST_BAR:
            first: RenderableType = one_line(fit([(epoch, 1), (step, 0)], width))
        else:
            bar: RenderableType = ProgressBar(total=self.total_steps, completed=self.meter.step, width=room)
            if ascii_only:
                bar = Text(("#" * round(room * self.fraction)).ljust(room, "."))
            first = Table.grid(padding=(0, 2, 0, 0))
            first.add_row(epoch, bar, step)
        silence = now - self.last_news
        if self.evaluating is not None:
            second = evaluation_text(self.evaluating)
        elif silence > max(SECONDS_WITHOUT_NEWS, 3 * self.meter.window.seconds / max(self.meter.window.events, 1)):
            second = fit([(f"no news for {duration(silence)}", 0), *self._figures()], width)
        else:
            second = fit(self._figures(), width)
        return Group(first, one_line(second))

    def validation_line(self, event: Validation, best_symbol: str, width: int | None) -> str:
        """Where it was and what it gave."""
        scores = event["scores"]
        ranks = {"accuracy": 1, "macro_f1": 4, "loss": 2} | ({"weighted_f1": 6, "mcc": 6} if self._verbose else {})
        ranks[self.best_metric] = 0
        items = [(epoch_of(event["epoch"], self.num_epochs), 0), (f"step {event['step']:,}", 5)]
        items += [(f"{label} {score(scores.get(key))}", ranks[key]) for key, label in SCORES.items() if key in ranks]
        rows = rows_of(scores)
        if rows is not None:
            items.append((f"{rows} rows", 3))
        if self._verbose:
            items.append((duration(event["seconds"]), 7))
        # Room for the mark in every line, so that all lines of a run have the same columns.
        mark = f"{best_symbol} best"
        line = fit([*items, (mark, -1)], width)
        return line if event["is_best"] else line.removesuffix(mark).rstrip()

    def _epoch(self) -> str:
        assert self._last is not None
        return epoch_of(self._last["records"][-1]["epoch"] + 1, self.num_epochs)

    def _step(self) -> str:
        return f"step {self.meter.step:,}/{self.total_steps:,}  {math.floor(100 * self.fraction)} %"

    def _figures(self) -> list[tuple[str, int]]:
        """Loss, rates and time left, as (text, rank) items."""
        assert self._last is not None
        meter, window, last = self.meter, self.meter.window, self._last["records"][-1]
        items = [(f"loss {score(meter.loss)}", 0)]
        if self._verbose:
            items.append((f"gradient norm {last['grad_norm']:.2f}", 5))
            items.append((f"learning rate {last['learning_rate']:.2e}", 6))
        rows, tokens = window.per_second(window.rows), window.per_second(window.tokens)
        if rows is not None and tokens is not None:
            items += [(f"{amount(rows)} rows/s", 2), (f"{amount(tokens)} tokens/s", 3)]
        if meter.padding is not None:
            items.append((f"padding {100 * meter.padding:.0f} %", 4))
        left = meter.seconds_left(self.total_steps)
        if left is not None and meter.step < self.total_steps:
            items.append((f"{duration(left)} left", 1))
        return items


def evaluation_text(event: Evaluating) -> str:
    """How far an evaluation is."""
    doing = EVALUATING.get(event["split"], f"evaluating {event['split']}")
    return f"{doing}  {event['rows_done']:,}/{event['rows']:,} rows"


def one_line(text: str) -> Text:
    """A line that is cut where the terminal ends: a live view must not wrap."""
    return Text(text, no_wrap=True, overflow="ellipsis")
