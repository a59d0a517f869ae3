"""The driver's watch: what is recorded of events, and what is said while there is no room for the workers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from raytrain_bert.config.errors import DataError
from raytrain_bert.driver import cause
from raytrain_bert.progress.board import LocalBoard
from raytrain_bert.progress.screen import Screen
from raytrain_bert.run_folder import RunFolder
from raytrain_bert.watch import Watch, metric_lines, waiting_for_resources

RECORD = {"epoch": 0, "step": 1, "loss": float("nan"), "rows": 4, "tokens": 30, "padded_tokens": 40, "seconds": 2.0}
READY = {
    "device": "CPU", "world_size": 2, "threads": 1, "precision": "fp32", "parameters": 1, "trainable_parameters": 1,
    "tokens_per_micro_batch": 1, "steps_per_epoch": 1, "total_steps": 1, "global_batch_size": 1,
}  # fmt: skip
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


def steps(*numbers: int, loss: float = 0.5) -> dict[str, Any]:
    records = [RECORD | {"step": number, "loss": loss, "grad_norm": 1.0} for number in numbers]
    return {"event": "steps", "records": records, "total_steps": 9, "seconds": 1.0}


def started(step: int, workers: int = 2, before: int = 2) -> dict[str, Any]:
    return {"event": "started", "step": step, "world_size": workers, "world_size_before": before}


def test_a_restart_is_noted_with_reason_steps_and_seconds(tmp_path: Path) -> None:
    watch = make_watch(tmp_path)
    take(watch, started(0), steps(1, 2, 3, 4, 5))
    take(watch, {"event": "lost", "reasons": {"1": "the process has died"}})
    take(watch, started(3, workers=1), steps(4))
    take(watch, steps(5, 6))
    (restart,) = watch.folder.state()["restarts"]
    assert restart["reasons"] == {"1": "the process has died"}
    assert (restart["after_step"], restart["steps_to_repeat"]) == (3, 2)
    assert (restart["workers"], restart["workers_before"]) == (1, 2)
    assert restart["seconds"] >= 0
    recorded = [json.loads(line)["step"] for line in watch.folder.metrics_path.read_text().splitlines()]
    assert recorded == [1, 2, 3, 4, 5, 6]


def test_steps_that_are_trained_again_are_compared(tmp_path: Path) -> None:
    watch = make_watch(tmp_path)
    take(watch, started(0), steps(1, 2, 3, 4))
    take(watch, started(2), steps(3))
    take(watch, steps(4, loss=0.6), steps(5))
    assert watch.repeats.fields() == {"steps": 2, "equal": 1, "largest_difference": pytest.approx(0.2)}
    file = io.StringIO()
    watch.screen = Screen(file)
    watch.close()
    assert file.getvalue().startswith("warning: of 2 steps that were trained again, 1 came out otherwise")
    assert watch.folder.state()["repeated"]["steps"] == 2


def test_with_another_number_of_workers_dropout_may_differ(tmp_path: Path) -> None:
    watch = make_watch(tmp_path)
    take(watch, started(0), steps(1, 2))
    take(watch, started(1, workers=1), steps(2, loss=0.9))
    file = io.StringIO()
    watch.screen = Screen(file)
    watch.close()
    assert file.getvalue() == ""


def test_a_resumed_run_compares_with_what_the_killed_one_wrote(tmp_path: Path) -> None:
    watch = make_watch(tmp_path)
    take(watch, started(0), steps(1, 2, 3))
    again = Watch(Screen(None), watch.folder, started=0.0)
    take(again, started(1), steps(2, 3, 4))
    again.close()
    assert again.folder.state()["repeated"] == {"steps": 2, "equal": 2, "largest_difference": 0.0}
    assert "restarts" not in again.folder.state()


def test_receipts_after_the_checkpoint_are_given_out_anew(tmp_path: Path) -> None:
    watch = make_watch(tmp_path)
    receipt = {"event": "epoch", "epoch": 0, "step": 3, "rows": 9, "rows_seen": 9, "repeated": 0, "is_whole": True}
    take(watch, started(0), steps(1, 2, 3), receipt, steps(4, 5, 6), receipt | {"epoch": 1, "step": 6})
    assert [r["epoch"] for r in watch.folder.state()["receipts"]] == [0, 1]
    take(watch, started(4), steps(5, 6), receipt | {"epoch": 1, "step": 6})
    assert [r["epoch"] for r in watch.folder.state()["receipts"]] == [0, 1]


def test_who_lags_is_told_once_after_a_silence(tmp_path: Path) -> None:
    watch, file = make_watch(tmp_path), io.StringIO()
    watch.screen = Screen(file)
    board = LocalBoard()
    workers = [{"rank": rank, "host": "here", "pid": rank, "node": None} for rank in (0, 1)]
    board.post([{"event": "ready", "workers": workers, **READY}, started(0)])
    watch.take(board)
    signs = {
        rank: {"step": 4, "stage": stage, "seconds_there": 50.0, "age": 1.0, "host": "here", "pid": rank}
        for rank, stage in ((0, 2), (1, 1))
    }
    signs[2] = signs[0] | {"age": 99.0, "pid": 5}  # of a worker that is gone
    board.signs = lambda: signs  # type: ignore[method-assign]
    for _ in range(3):
        watch.last_news -= 40
        watch.last_look -= 40
        watch.take(board)
    assert "worker 2" not in file.getvalue()
    assert file.getvalue().count("worker 1 (here, process 1) is still computing in step 4") == 1
    assert watch.lag is not None


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
