"""The trials of a sweep as they come and go; every change is written down at once."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from raytrain_bert.config.errors import RunFolderError
from raytrain_bert.sweep.records import FULL, SweepFolder, Trial, best_of, ranking

Told = Callable[[str, Trial], None]


def finite(value: float | None) -> float | None:
    """None for what is no number: JSON has no word for it, and it never wins."""
    return value if value is not None and math.isfinite(value) else None


class SweepState:
    """Safe to use from several threads."""

    def __init__(self, folder: SweepFolder, keys: Sequence[str], metric: str, *, gpus: float = 0.0) -> None:
        """With the trials that were written down."""
        self.folder, self.keys, self.metric, self.gpus = folder, tuple(keys), metric, gpus
        self.reasons: dict[int, str] = {}
        """Why a scheduler or the budget ended a trial."""
        self.stopping: str | None = None
        """Why the whole search ends before its last trial; None where it does not."""
        self.interrupted = False
        """Whether trials that are ended now go on later."""
        self.told: Told = lambda what, trial: None
        """Called with started, reported or ended."""
        self.changed = threading.Event()
        self._lock = threading.RLock()
        self._trials = {trial.number: trial for trial in folder.read()}
        self._begun: dict[int, float] = {}
        self._before = {number: (trial.seconds, trial.gpu_seconds) for number, trial in self._trials.items()}

    def trials(self) -> list[Trial]:
        """Copies, by number."""
        with self._lock:
            return [replace(self._trials[number]) for number in sorted(self._trials)]

    def running(self) -> list[Trial]:
        """Those that run now."""
        return [trial for trial in self.trials() if trial.number in self._begun]

    def best(self) -> Trial | None:
        """The best so far."""
        return best_of(self.trials(), self.metric)

    def gpu_seconds(self) -> float:
        """GPU time so far, of the trials that run too."""
        with self._lock:
            now = time.monotonic()
            under_way = sum(now - begun for begun in self._begun.values()) * self.gpus
            return under_way + sum(self._before.get(number, (0.0, 0.0))[1] for number in self._trials)

    def started(self, number: int, sample: dict[str, Any]) -> None:
        """A trial's process starts; with pbt, more than once."""
        with self._lock:
            if number in self._begun:
                self._trials[number].sample = dict(sample)
                self._write()
                return
            trial = self._trials.setdefault(number, Trial(number, dict(sample)))
            trial.sample, trial.status, trial.why = dict(sample), "running", ""
            trial.path = str(self.folder.trial(number).path.relative_to(self.folder.path))
            self._begun[number] = time.monotonic()
            self._write()
        self.told("started", replace(trial))

    def reported(self, number: int, result: dict[str, Any]) -> None:
        """A trial has validated."""
        with self._lock:
            trial = self._trials[number]
            self._take(trial, result)
            self._count_time(trial)
            self._write()
        self.told("reported", replace(trial))

    def ended(self, number: int, result: dict[str, Any], error: str | None = None) -> None:
        """A trial's process has ended, however it did."""
        with self._lock:
            trial = self._trials[number]
            if number not in self._begun:
                return
            self._take(trial, result)
            self._count_time(trial)
            self._before[number] = (trial.seconds, trial.gpu_seconds)
            self._begun.pop(number)
            run = self.folder.trial(number).state()
            failure = error or result.get("failed")
            if failure:
                trial.status, trial.why = "failed", failure
            elif run.get("status") == "trained":
                trial.status = "trained"
                trial.why = FULL
            elif self.interrupted:
                trial.status, trial.why = "unfinished", "interrupted"
            else:
                trial.status = "stopped"
                trial.why = self.reasons.get(number) or self.stopping or "ended by the scheduler"
            trial.history = run.get("history", trial.history)
            live = run.get("effective") or {}
            trial.effective = {key: live[key] for key in trial.sample if key in live} or trial.effective
            if trial.status in ("trained", "stopped"):
                self._read_best(trial)
            self._write()
        self.told("ended", replace(trial))

    def end_all(self) -> None:
        """The search is over: what still ran was ended with it."""
        for trial in self.running():
            self.ended(trial.number, {})

    def forget_checkpoints(self, kept: int) -> None:
        """Remove the checkpoints of ended trials that are not among the best `kept`."""
        import shutil

        ranked = ranking(self.trials(), self.metric)
        for trial in ranked[kept:]:
            if trial.has_ended:
                shutil.rmtree(self.folder.trial(trial.number).path / "checkpoints", ignore_errors=True)

    def write(self) -> None:
        """Write the files."""
        with self._lock:
            self._write()

    def _take(self, trial: Trial, result: dict[str, Any]) -> None:
        if "best" not in result:
            return
        trial.epoch, trial.step, trial.score = result["epoch"], result["step"], result["value"]
        trial.best_score, trial.best_epoch = finite(result["best"]["score"]), result["best"]["epoch"]
        trial.best_step = result["best"]["step"]
        trial.effective = dict(result["effective"])
        speed = self.folder.trial(trial.number).speed()
        trial.rows_per_second = speed if speed is not None else trial.rows_per_second

    def _read_best(self, trial: Trial) -> None:
        """The best as the newest checkpoint has it: it is the one whose weights are kept."""
        from raytrain_bert.checkpoint import CheckpointStore

        store = CheckpointStore(self.folder.trial(trial.number).path / "checkpoints")
        newest = store.latest()
        if newest is None:
            return
        try:
            progress = store.read_progress(newest)
        except RunFolderError:
            return
        trial.best_score, trial.best_epoch = finite(progress.best_score), progress.best_epoch
        trial.best_step, trial.step = progress.best_step, progress.step
        if progress.step_in_epoch == 0:
            trial.epoch = float(progress.epoch)

    def _count_time(self, trial: Trial) -> None:
        earlier = self._before.get(trial.number, (0.0, 0.0))
        now = time.monotonic() - self._begun[trial.number]
        trial.seconds = round(earlier[0] + now, 2)
        trial.gpu_seconds = round(earlier[1] + now * self.gpus, 2)

    def _write(self) -> None:
        self.changed.set()
        self.folder.write([self._trials[number] for number in sorted(self._trials)], self.keys, self.metric)
