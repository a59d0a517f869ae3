"""Rates of training over the last seconds, and the time that is left."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from raytrain_bert.progress.events import StepRecord

WINDOW_SECONDS = 20.0
SMOOTHING = 0.9
"""Weight of the past in the loss that is shown."""


@dataclass(frozen=True)
class Interval:
    """Sums over some steps of training."""

    seconds: float = 0.0
    events: int = 0
    steps: int = 0
    rows: int = 0
    tokens: int = 0
    padded_tokens: int = 0

    def __add__(self, other: Interval) -> Interval:
        return Interval(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def per_second(self, count: int) -> float | None:
        """The rate of one of the counts; None while nothing is known."""
        return count / self.seconds if self.seconds > 0 else None


class Meter:
    """Takes in steps and the pauses between them.

    Rates go by the training time that the events tell, so that validation and checkpoints do not count.
    """

    def __init__(self, window_seconds: float = WINDOW_SECONDS) -> None:
        """Start at zero."""
        self._window_seconds = window_seconds
        self._recent: deque[Interval] = deque()
        self._loss_sum = self._loss_weight = 0.0
        self._pause_seconds, self._steps_at_pause = 0.0, 0
        self.step = 0
        self.window = Interval()
        """The last seconds of training."""
        self.total = Interval()
        """All of the training."""

    def add_steps(self, records: Sequence[StepRecord], seconds: float) -> None:
        """Take in the steps of one event."""
        rows, tokens, padded_tokens = (
            sum(record[key] for record in records) for key in ("rows", "tokens", "padded_tokens")
        )
        interval = Interval(seconds, 1, len(records), rows, tokens, padded_tokens)
        self.total += interval
        self._recent.append(interval)
        while sum(old.seconds for old in self._recent) - self._recent[0].seconds >= self._window_seconds:
            self._recent.popleft()
        self.window = sum(self._recent, Interval())
        for record in records:
            if math.isfinite(record["loss"]):
                self._loss_sum = SMOOTHING * self._loss_sum + (1 - SMOOTHING) * record["loss"]
                self._loss_weight = SMOOTHING * self._loss_weight + (1 - SMOOTHING)
            self.step = record["step"]

    def add_pause(self, seconds: float) -> None:
        """Take in a validation or a checkpoint: the time left counts as many of them a step as there were so far."""
        self._pause_seconds += seconds
        self._steps_at_pause = self.total.steps

    @property
    def loss(self) -> float | None:
        """The smoothed training loss; None before the first finite one."""
        return self._loss_sum / self._loss_weight if self._loss_weight else None

    @property
    def padding(self) -> float | None:
        """Share of padding in the tokens of the window."""
        return 1 - self.window.tokens / self.window.padded_tokens if self.window.padded_tokens else None

    def seconds_left(self, total_steps: int) -> float | None:
        """Estimate of the time until the last step is done; None before the second event."""
        if self.total.events < 2 or not self.window.steps:
            return None
        a_step = self.window.seconds / self.window.steps
        if self._steps_at_pause:
            a_step += self._pause_seconds / self._steps_at_pause
        return max(total_steps - self.step, 0) * a_step
