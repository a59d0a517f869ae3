"""The driver's watch: what is recorded of events, and what is said while there is no room for the workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raytrain_bert.config.errors import DataError
from raytrain_bert.driver import Watch, cause, metric_lines, waiting_for_resources
from raytrain_bert.progress.board import LocalBoard
from raytrain_bert.progress.screen import Screen
from raytrain_bert.run_folder import RunFolder

RECORD = {"epoch": 0, "step": 1, "loss": float("nan"), "rows": 4, "tokens": 30, "padded_tokens": 40, "seconds": 2.0}
STEPS = {"event": "steps", "records": [RECORD], "total_steps": 2, "seconds": 2.0}


def make_watch(tmp_path: Path) -> Watch:
    folder = RunFolder(tmp_path / "run")
    folder.create("train: {}\n")
    return Watch(Screen(None), folder, started=0.0)


def take(watch: Watch, *events: dict[str, Any]) -> None:
    board = LocalBoard()
    board.post(events)
    watch.take(board)


def test_metrics_are_strict_json_a_line_each(tmp_path: Path) -> None:
    watch = make_watch(tmp_path)
    take(watch, STEPS)
    (line,) = watch.folder.metrics_path.read_text().splitlines()
    assert json.loads(line) == {"kind": "train", **RECORD, "loss": None}
    assert "NaN" not in line


def test_speed_and_times_are_sums_over_the_events(tmp_path: Path) -> None:
    watch = make_watch(tmp_path)
    take(watch, STEPS, STEPS)
    assert watch.speed() == {"rows_per_second": 2.0, "tokens_per_second": 15.0, "padding": 0.25}
    assert watch.split_of_time()["training"] == 4.0


def test_going_on_drops_what_was_recorded_after_the_checkpoint(tmp_path: Path) -> None:
    watch = make_watch(tmp_path)
    take(watch, STEPS)
    take(watch, {"event": "started", "step": 0})
    assert watch.folder.metrics_path.read_text() == ""


def test_what_is_no_measurement_is_not_recorded() -> None:
    assert metric_lines({"event": "phase", "text": "x"}) == []


def test_a_workers_own_user_error_is_found_behind_rays() -> None:
    class WorkerGroupError(Exception):
        worker_failures = {0: DataError("row 3")}  # noqa: RUF012

    found = cause(WorkerGroupError("workers failed"))
    assert isinstance(found, DataError)
    other = RuntimeError("no user error inside")
    assert cause(other) is other


@pytest.mark.usefixtures("local_ray")
def test_a_request_without_room_is_told_and_one_with_room_is_not() -> None:
    from ray.util import placement_group, remove_placement_group

    assert waiting_for_resources() is None
    group = placement_group([{"CPU": 64}, {"CPU": 64}])
    try:
        text = waiting_for_resources()
        assert text is not None
        assert "64 CPU + 64 CPU" in text
        assert "of 2 CPU" in text
    finally:
        remove_placement_group(group)
