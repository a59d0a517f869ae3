"""What a drill makes of two runs."""

from __future__ import annotations

import io
import json
import math
from typing import Any

from rich.console import Console

from raytrain_bert.drill_report import Outcome, compare, curve, table, to_json


def records(*losses: float, **more: Any) -> dict[tuple[str, int], dict[str, Any]]:
    return {
        ("train", step): {"kind": "train", "step": step, "loss": loss, "seconds": step * 0.1} | more
        for step, loss in enumerate(losses, start=1)
    }


def test_equal_runs_differ_by_nothing_whatever_their_times() -> None:
    again = {key: record | {"seconds": 9.0} for key, record in records(0.5, 0.4).items()}
    assert compare(records(0.5, 0.4), again) == (0, 0.0)
    assert curve(0.0) == "bit for bit"


def test_the_largest_relative_difference_counts() -> None:
    missing, difference = compare(records(0.5, 0.4, 0.2), records(0.5, 0.4004, 0.2))
    assert missing == 0
    assert math.isclose(difference, 0.001, rel_tol=1e-2)
    assert curve(difference) == "within 1e-03"


def test_steps_that_are_missing_are_lost() -> None:
    assert compare(records(0.5, 0.4, 0.3), records(0.5)) == (2, 0.0)


def test_a_number_against_none_is_another_curve() -> None:
    assert compare(records(0.5), {("train", 1): {"kind": "train", "step": 1, "loss": None}}) == (0, math.inf)
    assert curve(math.inf) == "another"


def test_only_a_survivor_without_loss_and_with_the_same_curve_passes() -> None:
    good = Outcome("x", True, repeated=3, lost=0, difference=0.0, seconds=4.0)
    assert good.passed
    assert not Outcome("x", False).passed
    assert not Outcome("x", True, lost=1, difference=0.0).passed
    assert not Outcome("x", True, lost=0, difference=0.1).passed
    assert not Outcome("x", True, lost=0).passed


def test_table_and_json_tell_every_outcome() -> None:
    outcomes = [
        Outcome("a worker killed", True, repeated=1234, lost=0, difference=0.0, seconds=75.0),
        Outcome("SIGTERM", False, "exit code 1 in place of 130"),
        Outcome("x", True, lost=0, difference=math.inf),
    ]
    file = io.StringIO()
    Console(file=file, width=120).print(table(outcomes))
    first, second = file.getvalue().splitlines()[1:3]
    assert first.split() == ["a", "worker", "killed", "yes", "1,234", "0", "bit", "for", "bit", "1", "min", "15", "s"]
    assert second.split()[:2] == ["SIGTERM", "NO"]
    assert "exit code 1 in place of 130" in second
    told = json.loads(to_json(outcomes, steps=60))
    assert told["steps"] == 60
    assert [outcome["passed"] for outcome in told["outcomes"]] == [True, False, False]
