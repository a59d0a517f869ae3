"""The terminal's view of a sweep."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.cells import cell_len

from raytrain_bert.sweep.records import Trial
from raytrain_bert.sweep.screen import MOST_REASONS, Now, SweepScreen, estimate

KEYS = ("optim.learning_rate", "optim.warmup_fraction", "optim.layer_decay", "train.global_batch_size")
WHY = (
    "Step 12: the loss is nan and the gradient norm nan (rows of the batch: reviews.csv row 1, reviews.csv row 7). "
    "Lower --optim.learning-rate, set --train.precision fp32, or leave such steps out with --train.non-finite skip."
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def trial(number: int, **more: Any) -> Trial:
    fields: dict[str, Any] = {"status": "trained", "why": "trained to the end", "seconds": 61.0}
    fields |= {"epoch": 3.0, "step": 99, "score": 0.9, "best_score": 0.9 + number / 1000, "best_epoch": 2.0}
    fields |= {"best_step": 66, "rows_per_second": 12.3}
    return Trial(number, dict.fromkeys(KEYS, 0.000123), **(fields | more))


def shown(trials: list[Trial], width: int, unit: str = "epochs") -> list[str]:
    terminal = Terminal()
    SweepScreen(terminal, width=width).results(Now(trials, KEYS, "accuracy", len(trials), 60.0, None, unit))
    return [line.rstrip() for line in terminal.getvalue().splitlines()]


@pytest.mark.parametrize("width", [80, 120, 200])
def test_every_line_names_its_trial_and_status_however_long_the_reasons(width: int) -> None:
    trials = [trial(1), trial(2, status="failed", why=WHY, score=None, best_score=None), trial(3)]
    lines = shown(trials, width)
    assert all(cell_len(line) <= width for line in lines)
    head = next(n for n, line in enumerate(lines) if line.startswith("trial"))
    assert [line.split()[:2] for line in lines[head + 1 : head + 4]] == [
        ["*3", "trained"],
        ["1", "trained"],
        ["2", "failed"],
    ]
    assert {"learning_rate", "epoch", "accuracy", "best", "time"} <= set(lines[head].split())
    reasons = " ".join(lines[head + 4 :])
    assert "trial 2 failed: Step 12: the loss is nan" in reasons
    assert "trained to the end" not in reasons


def test_many_reasons_are_told_up_to_a_number_and_the_rest_is_named() -> None:
    trials = [trial(n, status="failed", why=f"reason {n}") for n in range(MOST_REASONS + 3)]
    lines = shown(trials, 120)
    assert sum(": reason " in line for line in lines) == MOST_REASONS
    assert lines[-1] == "and 3 more, in trials.csv"


def test_a_sweep_by_steps_is_told_by_steps() -> None:
    lines = shown([trial(1)], 120, "steps")
    head = next(line for line in lines if line.startswith("trial"))
    assert "step" in head.split()
    stream = io.StringIO()
    screen = SweepScreen(stream)
    screen.unit = "steps"
    screen.trial_line("reported", trial(1), "accuracy", None)
    screen.trial_line("ended", trial(2, status="stopped", why="asha"), "accuracy", None)
    assert stream.getvalue().splitlines() == [
        "trial 1 step 99: accuracy 0.9000",
        "trial 2 stopped (asha): accuracy 0.9020 at step 66, 1 min 01 s",
    ]


def test_the_time_left_is_that_of_the_trials_that_are_left() -> None:
    ended = [trial(1, seconds=50.0), trial(2, seconds=70.0)]
    running = trial(3, status="running", seconds=20.0)
    assert estimate([*ended, running], 6, 2, {3: 20.0}) == pytest.approx((4 * 60 - 20) / 2)
    assert estimate([running], 6, 2, {3: 20.0}) is None
