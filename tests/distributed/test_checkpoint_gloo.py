"""Checkpoints of real gloo processes: resume at any step, with any number of workers, and what goes wrong."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raytrain_bert import loop
from raytrain_bert.checkpoint import CheckpointStore, Progress
from raytrain_bert.config.errors import RunFolderError
from raytrain_bert.config.schema import Config
from tests.distributed.gloo import run_gloo
from tests.distributed.training import (
    EPOCHS,
    events,
    make_config,
    make_parts,
    train_on_rank,
    train_to_the_end,
    weights_of,
    with_dropout,
)

STEPS = 12


def stop_after(parts: Any, progress: Progress, step: int) -> None:
    """Train until the stop that was asked for in this step; all is thrown away but the checkpoint."""
    original = loop.train_step

    def asking(*arguments: Any) -> Any:
        result = original(*arguments)
        if arguments[3] + 1 == step:
            parts.job.board.request_stop("test")
        return result

    loop.train_step = asking
    try:
        loop.run_to_the_end(parts, progress)
    finally:
        loop.train_step = original


def stopped_at_every_step(rank: int, world_size: int, config: Config, folder: Path) -> list[Any]:
    """Records and weights after a stop at each step; validation and Ray's report are left out of it."""
    loop.validate_and_save = lambda parts, progress, clocks: (
        loop.save(parts, progress, clocks),
        loop.stop_if_asked(parts),
    )
    loop.finish = lambda parts, progress: {}
    results = []
    for stop in range(1, STEPS):
        run_folder = folder / str(stop)
        stop_after(make_parts(config, run_folder), Progress(), stop)
        parts = make_parts(config, run_folder)
        progress = loop.restore(parts)
        assert progress.step == stop
        train_to_the_end(parts, progress)
        posted = parts.job.board.take()
        records = [record for event in posted if event["event"] == "steps" for record in event["records"]]
        epochs = [event for event in posted if event["event"] == "epoch"]
        results.append((records, epochs, weights_of(parts)))
    return results


@pytest.mark.parametrize("world_size", [1, 2])
def test_stopped_at_any_step_and_resumed_equals_undisturbed_bit_for_bit_with_dropout(
    model: Path, tmp_path: Path, world_size: int
) -> None:
    config = with_dropout(make_config(model, log_every_steps=1), 0.3)
    whole = run_gloo(train_on_rank, world_size, tmp_path, config, tmp_path / "whole")[0]
    for stop, (records, epochs, weights) in enumerate(
        run_gloo(stopped_at_every_step, world_size, tmp_path, config, tmp_path / "stopped")[0], start=1
    ):
        expected = [without_seconds(record) for record in whole["records"] if record["step"] > stop]
        assert [without_seconds(record) for record in records] == expected
        # The receipt of the epoch under way comes back with the checkpoint.
        assert epochs == [event for event in whole["epochs"] if event["step"] > stop]
        for name, tensor in whole["weights"].items():
            assert np.array_equal(weights[name], tensor), f"{name} after step {stop}"


def without_seconds(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in ("seconds", "straggler_gap")}


def half_on_rank(rank: int, world_size: int, config: Config, run_folder: Path) -> None:
    stop_after(make_parts(config, run_folder), Progress(), 4)


def rest_on_rank(rank: int, world_size: int, config: Config, run_folder: Path) -> dict[str, Any]:
    parts = make_parts(config, run_folder)
    progress = loop.restore(parts)
    (started,) = events(parts, "started") or [None]
    train_to_the_end(parts, progress)
    posted = parts.job.board.take()
    records = [record for event in posted if event["event"] == "steps" for record in event["records"]]
    return {
        "started": started,
        "records": records,
        "epochs": [event for event in posted if event["event"] == "epoch"],
    }


@pytest.mark.parametrize("world_size", [1, 3])
def test_resume_with_another_number_of_workers_keeps_the_curve(model: Path, tmp_path: Path, world_size: int) -> None:
    config = make_config(model, log_every_steps=1)
    whole = run_gloo(train_on_rank, 2, tmp_path, config, tmp_path / "whole")[0]
    run_gloo(half_on_rank, 2, tmp_path, config, tmp_path / "run")
    rest = run_gloo(rest_on_rank, world_size, tmp_path, config, tmp_path / "run")[0]
    assert (rest["started"]["step"], rest["started"]["world_size_before"]) == (4, 2)
    assert rest["started"]["world_size"] == world_size
    ours, theirs = rest["records"], whole["records"][4:]
    for key in ("step", "epoch", "rows", "tokens", "learning_rate"):
        assert [record[key] for record in ours] == [record[key] for record in theirs], key
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose([r[key] for r in ours], [r[key] for r in theirs], rtol=1e-5, err_msg=key)
    first, second = rest["epochs"]
    assert first["rows_per_rank"] is None  # of two and of another number of workers
    assert len(second["rows_per_rank"]) == world_size
    assert all(event["rows_seen"] == event["rows"] == 45 and event["repeated"] == 0 for event in rest["epochs"])


def save_where_files_are_short(rank: int, world_size: int, folder: Path, background: bool) -> tuple[str, list[str]]:
    """A second save whose files may not grow beyond 2,000 bytes, as on a full disk; error and what is left."""
    store = CheckpointStore(folder, background=background)
    tensors = {f"w{n}": torch.arange(1000.0) for n in range(4)}
    store.save(tensors, Progress(step=1))
    store.wait()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails with EFBIG, and does not kill
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        store.save(tensors, Progress(step=2))
        store.wait()
    except RunFolderError as error:
        message = str(error)
    else:
        message = "no error"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    torch.distributed.barrier()
    damage = store.damage(1)
    assert damage is None, damage
    return message, sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_a_full_disk_is_a_clear_error_on_every_rank_and_leaves_the_checkpoint_before(
    tmp_path: Path, background: bool
) -> None:
    for message, left in run_gloo(save_where_files_are_short, 2, tmp_path, tmp_path / "store", background):
        assert "The checkpoint of step 2 could not be written" in message
        assert "the disk is full" in message
        assert "The checkpoint of step 1 is intact" in message
        assert left == ["step-00000001"]


def fail_on_rank_0(rank: int, world_size: int, folder: Path) -> str:
    """The folder cannot be made, which rank 0 alone notices."""
    folder.parent.mkdir(exist_ok=True)
    if rank == 0:
        folder.write_text("a file where the folder should be")
    torch.distributed.barrier()
    store = CheckpointStore(folder, background=True)
    store.save({"w": torch.ones(3)}, Progress(step=1))
    try:
        store.wait()
    except Exception as error:
        return str(error)
    return "no error"


def test_an_error_of_rank_0_alone_reaches_every_rank(tmp_path: Path) -> None:
    for message in run_gloo(fail_on_rank_0, 2, tmp_path, tmp_path / "x" / "checkpoints"):
        assert "The checkpoint of step 1 could not be written" in message
        assert "Not a directory" in message


def saved_when_due(rank: int, world_size: int, config: Config, run_folder: Path) -> list[int]:
    parts, progress = make_parts(config, run_folder), Progress()
    train_to_the_end(parts, progress)
    loop.tell_saved(parts)
    return [event["step"] for event in events(parts, "checkpoint")]


def test_checkpoints_by_steps_and_by_minutes(model: Path, tmp_path: Path) -> None:
    config = make_config(model, log_every_steps=1)
    by_steps = config.checkpoint.model_copy(update={"every_steps": 4, "every_minutes": None})
    by_minutes = config.checkpoint.model_copy(update={"every_minutes": 1e-9})
    for name, checkpoint, steps in (
        ("steps", by_steps, [4, 8]),
        ("minutes", by_minutes, [1, 2, 3, 4, 5, 7, 8, 9, 10, 11]),  # after the last of an epoch the caller saves
    ):
        settings = config.model_copy(update={"checkpoint": checkpoint})
        assert run_gloo(saved_when_due, 2, tmp_path, settings, tmp_path / name)[0] == steps


def saved_before_a_preemption(rank: int, world_size: int, config: Config, run_folder: Path) -> tuple[list[int], Any]:
    """Ray's notice comes while step 5 is trained, and stays; asked at every exchange."""
    import ray.train

    parts, progress = make_parts(config, run_folder), Progress()
    notice = ray.train.PreemptionInfo(deadline_ms=1, preempted_node_to_ranks={"node": [1]})
    ray.train.get_preemption_info = lambda: notice if progress.step >= 5 else None
    loop.SECONDS_BETWEEN_QUESTIONS = -1.0
    train_to_the_end(parts, progress)
    posted = parts.job.board.take()
    saved = [event["step"] for event in posted if event["event"] == "checkpoint"]
    return saved, [event["ranks"] for event in posted if event["event"] == "taken_away"]


def test_a_preemption_notice_is_answered_with_one_checkpoint(model: Path, tmp_path: Path) -> None:
    config = make_config(model, log_every_steps=1)
    saved, told = run_gloo(saved_before_a_preemption, 2, tmp_path, config, tmp_path / "run")[0]
    assert (saved, told) == ([5], [[1]])


def test_epochs_are_as_the_tests_take_them() -> None:
    assert STEPS == EPOCHS * -(-45 // 8)
