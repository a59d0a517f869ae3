from __future__ import annotations

import math

import pytest

from raytrain_bert.progress.meter import Meter


def steps(first: int, *, count: int = 1, loss: float = 1.0, rows: int = 32, tokens: int = 900, padded: int = 1000):
    return [
        {
            "epoch": 0,
            "step": first + number,
            "loss": loss,
            "grad_norm": 1.0,
            "learning_rate": 1e-5,
            "rows": rows,
            "tokens": tokens,
            "padded_tokens": padded,
        }
        for number in range(count)
    ]


def test_rates_are_sums_over_training_time():
    meter = Meter()
    meter.add_steps(steps(1, count=2), seconds=0.5)
    meter.add_steps(steps(3, rows=16, tokens=500, padded=1000), seconds=1.5)
    assert meter.window.per_second(meter.window.rows) == (32 + 32 + 16) / 2
    assert meter.window.per_second(meter.window.tokens) == (900 + 900 + 500) / 2
    assert meter.padding == pytest.approx(1 - 2300 / 3000)


def test_rates_follow_the_last_seconds_and_the_total_keeps_all():
    meter = Meter(window_seconds=20)
    for step in range(1, 31):
        meter.add_steps(steps(step, rows=10), seconds=1)
    for step in range(31, 71):
        meter.add_steps(steps(step, rows=40), seconds=0.5)
    assert meter.window.seconds == 20
    assert meter.window.per_second(meter.window.rows) == 80
    assert meter.total.per_second(meter.total.rows) == (30 * 10 + 40 * 40) / 50


def test_pauses_count_for_the_time_left_but_not_for_the_rates():
    meter = Meter()
    assert meter.seconds_left(100) is None
    meter.add_steps(steps(1, count=5), seconds=1)
    meter.add_steps(steps(6, count=5), seconds=1)
    assert meter.seconds_left(100) == pytest.approx(90 * 0.2)
    meter.add_pause(4)
    meter.add_pause(1)
    assert meter.window.per_second(meter.window.rows) == 160
    assert meter.seconds_left(100) == pytest.approx(90 * (0.2 + 5 / 10))
    meter.add_steps(steps(11, count=10), seconds=2)
    assert meter.seconds_left(100) == pytest.approx(80 * (0.2 + 5 / 10))


def test_loss_is_the_weighted_mean_of_the_past_without_numbers_that_are_none():
    meter = Meter()
    assert meter.loss is None
    losses = [2.0, 1.0, math.nan, 4.0, math.inf]
    for step, loss in enumerate(losses, 1):
        meter.add_steps(steps(step, loss=loss), seconds=1)
    weights = [0.9**2, 0.9, 1.0]
    expected = sum(w * x for w, x in zip(weights, [2.0, 1.0, 4.0], strict=True)) / sum(weights)
    assert meter.loss == pytest.approx(expected)


def test_nothing_is_divided_by_zero():
    meter = Meter()
    meter.add_steps(steps(1, rows=0, tokens=0, padded=0), seconds=0)
    assert meter.window.per_second(meter.window.rows) is None
    assert meter.padding is None
