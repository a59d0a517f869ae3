"""The one view of a run: live in a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from rich.console import RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from raytrain_bert.progress.closing import KEY_WIDTH, Summary, best_row, receipt_row, score_table, speed_row, time_row
from raytrain_bert.progress.events import Checkpoint as CheckpointSaved
from raytrain_bert.progress.events import (
    Evaluating,
    Lost,
    Ready,
    Skipped,
    Started,
    Steps,
    TakenAway,
    Tested,
    Validation,
)
from raytrain_bert.progress.format import amount, clean, duration, wrap
from raytrain_bert.progress.terminal import open_console
from raytrain_bert.progress.training import TrainingView, evaluation_text, one_line

__all__ = ["Screen", "Summary"]

WIDEST = 120
"""A longer line is hard to read, however wide the terminal is."""
REFRESHES_PER_SECOND = 5
LINE_SECONDS = 10
"""Least time between two plain lines of progress."""
LINE_FRACTION = 0.1
"""Progress worth a plain line."""
LONGEST_SILENCE = 60
"""After so many seconds, less progress than that is worth a plain line too."""
SYMBOLS = {"done": ("✓", "-"), "failed": ("✗", "x"), "best": ("★", "*")}


class LineClock:
    """Decides when progress is worth another plain line."""

    def __init__(self, clock: Callable[[], float], *, first_at_once: bool) -> None:
        """Start now; the first line is due at once or after the usual time."""
        self._clock = clock
        self._time, self._fraction = (-math.inf, -math.inf) if first_at_once else (clock(), 0.0)

    def is_due(self, fraction: float) -> bool:
        """Whether a line is due at this progress; if so, counts it as written."""
        waited, grown = self._clock() - self._time, fraction - self._fraction
        due = waited >= LINE_SECONDS and (grown >= LINE_FRACTION or waited >= LONGEST_SILENCE)
        if due:
            self._time, self._fraction = self._clock(), fraction
        return due


class Screen:
    """Draws phases, facts, training and the closing table.

    Every method may be called in any order and more than once; text is shown as it is, without markup.
    """

    def __init__(
        self,
        stream: TextIO | None,
        *,
        errors: TextIO | None = None,
        quiet: bool = False,
        verbose: bool = False,
        clock: Callable[[], float] = time.monotonic,
        started: float | None = None,
        width: int | None = None,
    ) -> None:
        """Draw nothing yet.

        Args:
            stream: where to draw; None drops everything.
            errors: where errors go, in place of `stream`.
            quiet: only errors and the closing table.
            verbose: more facts, and room for the messages of others: plain lines in a terminal too.
            clock: gives seconds.
            started: when the run began, on that clock; None for now.
            width: columns, in place of the terminal's own.
        """
        self.console = open_console(stream, width)
        self._error_console = self.console if errors is None else open_console(errors, width)
        # With foreign messages in between, nothing is redrawn: they would land in the middle of a line.
        self._redraws = self.console.is_terminal and not verbose
        self._quiet, self._verbose, self._clock = quiet, verbose, clock
        self._started = clock() if started is None else started
        self._startup_seconds: float | None = None
        self._live: Live | None = None
        self._phase: str | None = None
        self._training = TrainingView(verbose=verbose)
        self._began: float | None = None
        """When the phase or training under way began; None between them."""
        self._training_lines = self._evaluation_lines = LineClock(clock, first_at_once=True)
        self._seconds = {"validation": 0.0, "saving": 0.0, "test": 0.0}
        self._best: Validation | None = None
        self._test: Mapping[str, Any] | None = None

    # What the driver says

    def phase(self, text: str) -> None:
        """Say what is being done from now on, until the next phase, facts or training."""
        self._end_current()
        self._phase, self._began = clean(text), self._clock()
        if self._redraws:
            self._show(self._phase_view(self._phase, self._began))
        else:
            self._print(Text(f"{self._phase} ..."))

    def facts(self, rows: Sequence[tuple[str, str]]) -> None:
        """Show what was found out, one aligned row each."""
        self._end_current()
        for key, value in rows:
            self._row(key, value)

    def note(self, text: str) -> None:
        """Tell something that is worth a line."""
        self._print(Text(self._wrapped(text)))

    def warning(self, text: str) -> None:
        """Tell something that may go wrong."""
        self._print(Text.assemble(("warning: ", "yellow"), self._wrapped(text, first=9, indent=2)))

    def error(self, title: str, message: str) -> None:
        """Show why the run ends; shown in every mode."""
        self._end_current(done=False)
        body = self._wrapped(message, first=len(title) + 2, indent=2)
        self._error_console.print(Text.assemble((f"{title}: ", "bold red"), body), soft_wrap=True)

    def close(self) -> None:
        """Take the live view off the terminal."""
        if self._live is not None:
            self._live.stop()
        self._live = self._phase = self._began = None

    @property
    def best_metric(self) -> str:
        """The validation metric that chooses the best checkpoint; always shown."""
        return self._training.best_metric

    @best_metric.setter
    def best_metric(self, name: str) -> None:
        self._training.best_metric = name

    def handle(self, event: Mapping[str, Any]) -> None:
        """Show one event of the workers; of an unknown kind, nothing."""
        handlers: dict[str, Callable[[Any], None]] = {
            "phase": lambda event: self.phase(event["text"]),
            "note": lambda event: self.note(event["text"]),
            "warning": lambda event: self.warning(event["text"]),
            "ready": self._on_ready,
            "started": self._on_started,
            "lost": self._on_lost,
            "taken_away": self._on_taken_away,
            "skipped": self._on_skipped,
            "steps": self._on_steps,
            "evaluating": self._on_evaluating,
            "validation": self._on_validation,
            "checkpoint": self._on_checkpoint,
            "stopped_early": lambda event: self.note(f"stopped early: {event['reason']}"),
            "test": self._on_test,
        }
        handler = handlers.get(event["event"])
        if handler is not None:
            handler(event)

    def closing(self, summary: Summary) -> None:
        """Show the closing table."""
        self._end_current()
        seconds = self._clock() - self._started
        style = "bold green" if summary.status == "finished" else "bold"
        lines = [Text(f"{clean(summary.status)} in {duration(seconds)}", style=style), Text()]
        table = score_table(self._score_columns(summary))
        lines += [*table, Text()] if table else []
        if not self._quiet:
            lines.insert(0, Text())
        for line in lines:
            self._print(line, always=True)
        total = self._training.meter.total
        parts = {"start-up": self._startup_seconds or 0.0, "training": total.seconds, **self._seconds}
        rows = [
            *receipt_row(summary.receipts),
            *time_row(parts, seconds),
            *speed_row(total),
            ("run folder", summary.run_folder),
        ]
        best = summary.best or self._best_told()
        for key, value in [best_row(best, self._training.num_epochs), *rows] if best else rows:
            self._row(key, value, always=True)
        if summary.command is not None:
            self._row(summary.command_label, "", always=True)
            self._print(Text("  " + clean(summary.command), style="bold"), always=True)

    # What the workers say

    def _on_ready(self, event: Ready) -> None:
        self._end_startup(self._clock())
        self._training.num_epochs = -(-event["total_steps"] // event["steps_per_epoch"])
        workers, threads = event["world_size"], event["threads"]
        devices = f"{workers} x {event['device']}"
        if event["device"] == "CPU":
            each = " each" if workers > 1 else ""
            devices = f"CPU, {_counted(workers, 'worker')}, {_counted(threads, 'thread')}{each}"
        parameters, trained = event["parameters"], event["trainable_parameters"]
        share = "all trained" if trained == parameters else f"{amount(trained)} trained"
        rows = [
            ("devices", devices),
            ("precision", event["precision"]),
            ("parameters", f"{amount(parameters)}, {share}"),
            ("batch", f"{event['global_batch_size']:,} rows a step over all workers"),
            ("steps", f"{event['total_steps']:,}, {event['steps_per_epoch']:,} an epoch"),
        ]
        if self._verbose:
            rows.append(("micro batches", f"up to {event['tokens_per_micro_batch']:,} tokens, padding included"))
        self.facts(rows)

    def _on_started(self, event: Started) -> None:
        if not event["step"]:
            return
        workers, before = event.get("world_size"), event.get("world_size_before")
        text = f"going on after step {event['step']:,}"
        if workers != before and workers is not None:
            text += f" with {_counted(workers, 'worker')} in place of {before}: the same rows a step, the same curve"
        self.note(text)

    def _on_lost(self, event: Lost) -> None:
        told = sorted(event["reasons"].items())
        reasons = [reason if reason.startswith("worker ") else f"worker {rank}: {reason}" for rank, reason in told]
        self.warning("; ".join(reasons) + ". New workers go on from the last checkpoint.")

    def _on_taken_away(self, event: TakenAway) -> None:
        ranks = ", ".join(map(str, event["ranks"]))
        self.warning(f"Ray announces that the machine of worker {ranks} will be taken away; saving now.")

    def _on_skipped(self, event: Skipped) -> None:
        self.warning(
            f"step {event['step']:,} has no finite gradient (loss {event['loss']}) and is left out "
            f"({event['skipped']:,} so far); {event['rows']}."
        )

    def _on_steps(self, event: Steps) -> None:
        if not event["records"]:
            return
        now, view = self._clock(), self._training
        self._end_startup(now - event["seconds"])
        if self._began is None or self._phase is not None:
            self._end_current()
            self._began = now - event["seconds"]
            self._training_lines = LineClock(self._clock, first_at_once=True)
        view.add(event, now)
        self._show(lambda: view.render(self._width(), self._clock(), not self._speaks_unicode()))
        if not self._redraws and self._training_lines.is_due(view.fraction):
            self._print(Text(view.line(self._line_width())))

    def _on_evaluating(self, event: Evaluating) -> None:
        if self._training.evaluating is None:
            self._evaluation_lines = LineClock(self._clock, first_at_once=False)
        self._training.evaluating = event
        if not self._redraws and self._evaluation_lines.is_due(event["rows_done"] / max(event["rows"], 1)):
            self._print(Text(evaluation_text(event)))

    def _on_validation(self, event: Validation) -> None:
        self._count_pause("validation", event["seconds"])
        if event["is_best"] or self._best is None:
            self._best = event
        line = self._training.validation_line(event, self._symbol("best"), self._line_width())
        self._print(Text(line, style="bold" if event["is_best"] else ""))

    def _on_checkpoint(self, event: CheckpointSaved) -> None:
        self._count_pause("saving", event["seconds"])
        if self._verbose:
            self.note(f"checkpoint after step {event['step']:,} in {duration(event['seconds'])}: {event['path']}")

    def _on_test(self, event: Tested) -> None:
        self._seconds["test"] += event["seconds"]
        self._test, self._training.evaluating = event["scores"], None

    def _count_pause(self, part: str, seconds: float) -> None:
        self._seconds[part] += seconds
        self._training.meter.add_pause(seconds)
        self._training.evaluating, self._training.last_news = None, self._clock()

    def _end_startup(self, moment: float) -> None:
        if self._startup_seconds is None:
            self._startup_seconds = moment - self._started

    def _score_columns(self, summary: Summary) -> list[tuple[str, Mapping[str, Any]]]:
        columns: list[tuple[str, Mapping[str, Any]]] = []
        # A resumed run may have had its best validation before this process began.
        if self._best is not None and (summary.best is None or summary.best["step"] == self._best["step"]):
            columns.append(("validation", self._best["scores"]))
        test = self._test if summary.test is None else summary.test
        return columns if test is None else [*columns, ("test", test)]

    def _best_told(self) -> Mapping[str, Any] | None:
        if self._best is None:
            return None
        metric = self.best_metric
        where = {key: self._best[key] for key in ("epoch", "step")}
        return {**where, "metric": metric, "score": self._best["scores"].get(metric)}

    # How it comes to the screen

    def _end_current(self, *, done: bool = True) -> None:
        """End the phase or training under way, with a line that says how long it took."""
        phase, began = self._phase, self._began
        self.close()
        self._training.evaluating = None
        if began is None:
            return
        text = phase or f"training, {_counted(self._training.meter.total.steps, 'step')}"
        seconds = self._clock() - began
        # Plain lines have told the beginning: the next line shows the end of a short phase.
        if self._redraws or seconds >= 1 or not done:
            line = f"{self._symbol('done' if done else 'failed')} {text}  {duration(seconds)}"
            self._print(Text(line, style="dim" if done else "red"))

    def _phase_view(self, text: str, began: float) -> Callable[[], RenderableType]:
        spinner = Spinner("dots" if self._speaks_unicode() else "line", style="cyan")

        def view() -> RenderableType:
            words = f"{text}  {duration(self._clock() - began)}"
            evaluating = self._training.evaluating
            if evaluating is not None:
                words += f"  {evaluating['rows_done']:,}/{evaluating['rows']:,} rows"
            line = Table.grid(padding=(0, 1, 0, 0))
            line.add_row(spinner, one_line(words))
            return line

        return view

    def _show(self, view: Callable[[], RenderableType]) -> None:
        """Draw this view at the bottom of the terminal until it is ended."""
        if self._quiet or not self._redraws or self._live is not None:
            return
        self._live = Live(
            get_renderable=view,
            console=self.console,
            transient=True,
            refresh_per_second=REFRESHES_PER_SECOND,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start(refresh=True)

    def _row(self, key: str, value: str, *, always: bool = False) -> None:
        head = clean(key).ljust(KEY_WIDTH - 1) + " "
        body = wrap("x" * len(head) + clean(value), self._line_width(), indent=KEY_WIDTH)[len(head) :]
        self._print(Text.assemble((head, "dim"), body), always=always)

    def _wrapped(self, text: str, first: int = 0, indent: int = 0) -> str:
        """Wrapped for a terminal, with room for `first` columns before the first line."""
        return wrap("x" * first + clean(text), self._line_width(), indent)[first:]

    def _print(self, text: Text, *, always: bool = False) -> None:
        if always or not self._quiet:
            text.rstrip()
            self.console.print(text, soft_wrap=True)

    def _line_width(self) -> int | None:
        """Where lines are broken; nowhere in a file."""
        return self._width() if self.console.is_tty else None

    def _width(self) -> int:
        return min(self.console.width, WIDEST)

    def _speaks_unicode(self) -> bool:
        return self.console.encoding.startswith("utf")

    def _symbol(self, name: str) -> str:
        return SYMBOLS[name][0 if self._speaks_unicode() else 1]


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
