"""What one rank meets: a bad row, a lost peer, a loss that is not finite. All ranks learn of it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raytrain_bert import loop
from raytrain_bert.checkpoint import Progress
from raytrain_bert.config.errors import ResourceError, TrainingError
from raytrain_bert.config.schema import Config
from raytrain_bert.faults import PeerLost, WorkerError, WorkerFault
from tests.distributed.gloo import run_gloo
from tests.distributed.training import make_config, make_parts, train_to_the_end, weights_of

BAD_ROW = 17


def train_with_a_bad_row(rank: int, world_size: int, config: Config, run_folder: Path) -> tuple[str, str, str]:
    """The label of one row is none; error of this rank, and its traceback."""
    parts = make_parts(config, run_folder)
    parts.rows.label_ids = np.where(np.arange(len(parts.rows)) == BAD_ROW, 99, parts.rows.label_ids)
    try:
        train_to_the_end(parts, Progress())
    except WorkerFault as error:
        return type(error).__name__, str(error), error.trace
    return "none", "", ""


def test_a_bad_row_is_named_by_the_rank_that_has_it(model: Path, tmp_path: Path) -> None:
    results = run_gloo(train_with_a_bad_row, 2, tmp_path, make_config(model), tmp_path / "run")
    kinds = [kind for kind, _, _ in results]
    assert sorted(kinds) == [PeerLost.__name__, WorkerError.__name__]
    rank = kinds.index(WorkerError.__name__)
    _, message, trace = results[rank]
    first, where = message.splitlines()
    assert first.startswith("IndexError: Target 99 is out of bounds")
    assert where.startswith(f"worker {rank} (")
    assert "step " in where
    assert f"reviews.csv row {BAD_ROW + 1}" in where  # rows count from 1
    assert "Traceback (most recent call last)" in trace
    assert "cross_entropy" in trace


def train_out_of_memory(rank: int, world_size: int, config: Config, run_folder: Path) -> str:
    parts = make_parts(config, run_folder)

    def too_big(module: Any, arguments: Any, output: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    parts.module.register_forward_hook(too_big)
    with pytest.raises(ResourceError) as error:
        train_to_the_end(parts, Progress())
    return str(error.value)


def test_out_of_memory_tells_the_shape_of_the_batch_and_the_flags_that_help(model: Path, tmp_path: Path) -> None:
    config = make_config(model, tokens_per_micro_batch=64)
    (message,) = run_gloo(train_out_of_memory, 1, tmp_path, config, tmp_path / "run")
    rows, tokens, product = map(int, re.findall(r"(\d+) rows x (\d+) tokens = (\d+) \(up to 64", message)[0])
    assert rows * tokens == product <= 64
    for flag in ("--train.tokens-per-micro-batch", "--data.max-length", "--model.gradient-checkpointing"):
        assert flag in message


def die_in_the_third_step(rank: int, world_size: int, config: Config, run_folder: Path) -> tuple[str, str]:
    parts = make_parts(config, run_folder)
    original = loop.train_step

    def dying(*arguments: Any) -> Any:
        if rank == 1 and arguments[3] == 2:
            os._exit(0)
        return original(*arguments)

    loop.train_step = dying
    try:
        train_to_the_end(parts, Progress())
    except WorkerFault as error:
        (run_folder.parent / "told").write_text(f"{type(error).__name__} {error}")
    return "", ""


def test_the_death_of_a_peer_is_told_from_a_fault(model: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"1\.pkl"):  # rank 1 leaves no result
        run_gloo(die_in_the_third_step, 2, tmp_path, make_config(model), tmp_path / "run")
    told = (tmp_path / "told").read_text()
    assert told.startswith("PeerLost worker 0 (")
    assert "step 3" in told


def train_with_a_broken_step(
    rank: int, world_size: int, config: Config, run_folder: Path, broken: tuple[int, ...]
) -> dict[str, Any]:
    """In these steps (from 1) the logits of rank 1 alone are no numbers."""
    parts, progress = make_parts(config, run_folder), Progress()
    original = loop.train_step
    hurt = {"now": False}

    def breaking(module: Any, arguments: Any, output: Any) -> Any:
        if hurt["now"]:
            output.logits = output.logits * float("nan")
        return output

    parts.module.register_forward_hook(breaking)
    before: list[Any] = []

    def watched(*arguments: Any) -> Any:
        hurt["now"] = arguments[3] + 1 in broken and rank == world_size - 1
        weights = weights_of(parts)
        result = original(*arguments)
        if arguments[3] + 1 in broken:
            before.append(all(np.array_equal(tensor, weights[name]) for name, tensor in weights_of(parts).items()))
        return result

    loop.train_step = watched
    result: dict[str, Any] = {"error": None}
    try:
        train_to_the_end(parts, progress)
    except TrainingError as error:
        result["error"] = str(error)
    posted = parts.job.board.take()
    return result | {
        "unchanged": before,
        "skipped": progress.skipped_steps,
        "step": progress.step,
        "told": [event for event in posted if event["event"] == "skipped"],
        "records": [record for event in posted if event["event"] == "steps" for record in event["records"]],
        "weights": weights_of(parts),
    }


def test_a_loss_that_is_not_finite_stops_every_rank_at_the_same_step_and_names_its_rows(
    model: Path, tmp_path: Path
) -> None:
    for every in (1, 3):  # the exchange may come later than the step
        config = make_config(model, log_every_steps=every)
        results = run_gloo(train_with_a_broken_step, 2, tmp_path, config, tmp_path / "run", (4,))
        assert results[0]["error"] == results[1]["error"]
        assert results[0]["error"].startswith("Step 4: the loss is nan")
        assert "reviews.csv row " in results[0]["error"]
        assert "--train.non-finite skip" in results[0]["error"]


def test_steps_that_are_not_finite_are_skipped_and_counted(model: Path, tmp_path: Path) -> None:
    config = make_config(model, log_every_steps=1, non_finite="skip")
    results = run_gloo(train_with_a_broken_step, 2, tmp_path, config, tmp_path / "run", (4, 9))
    for result in results:
        assert (result["error"], result["skipped"], result["step"]) == (None, 2, 12)
        assert result["unchanged"] == [True, True]
        assert all(np.isfinite(tensor).all() for tensor in result["weights"].values())
    told = results[0]["told"]
    assert [(event["step"], event["skipped"]) for event in told] == [(4, 1), (9, 2)]
    assert "reviews.csv row " in told[0]["rows"]
    assert [record["step"] for record in results[0]["records"] if record.get("skipped")] == [4, 9]
    for name, tensor in results[0]["weights"].items():
        assert np.array_equal(tensor, results[1]["weights"][name]), name


def test_nothing_but_skipped_steps_ends_the_run(model: Path, tmp_path: Path) -> None:
    config = make_config(model, log_every_steps=1, non_finite="skip", num_epochs=10)
    (result,) = run_gloo(train_with_a_broken_step, 1, tmp_path, config, tmp_path / "run", tuple(range(3, 61)))
    assert result["error"].startswith("25 steps in a row, up to step 27,")
