"""Every training row once an epoch, whoever serves it; the order is the seed's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytrain_bert.checkpoint import Progress
from raytrain_bert.config.schema import Config
from raytrain_bert.loop import evaluate
from tests.distributed.gloo import run_gloo
from tests.distributed.training import EPOCHS, SIZES, Sizes, events, make_config, make_parts, train_to_the_end


def served_on_rank(rank: int, world_size: int, config: Config, run_folder: Path, sizes: Sizes) -> dict[str, Any]:
    """The rows that this rank really forwarded, by epoch, noted where the model is called."""
    import raytrain_bert.loop as loop

    parts, progress = make_parts(config, run_folder, sizes), Progress()
    served: list[list[int]] = [[] for _ in range(EPOCHS)]
    original = loop.train_step

    def noted(parts: Any, share: Any, weight: float, step: int) -> Any:
        if share.counted:
            served[progress.epoch] += [int(row) for batch in share.micro_batches for row in batch.rows]
        return original(parts, share, weight, step)

    loop.train_step = noted
    train_to_the_end(parts, progress)
    scores, _ = evaluate(parts, "validation")
    return {"served": served, "epochs": events(parts, "epoch"), "scores": scores}


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [(1, SIZES), (2, SIZES), (3, SIZES), (3, (2, 1, 1))],
    ids=["one", "two", "three", "few-rows"],
)
def test_every_row_is_served_once_an_epoch(model: Path, tmp_path: Path, world_size: int, sizes: Sizes) -> None:
    results = run_gloo(served_on_rank, world_size, tmp_path, make_config(model), tmp_path / "run", sizes)
    rows = sizes[0]
    for epoch in range(EPOCHS):
        everything = [row for result in results for row in result["served"][epoch]]
        assert sorted(everything) == list(range(rows))  # the training rows are the first ones of the table
        receipt = results[0]["epochs"][epoch]
        assert receipt["rows_per_rank"] == [len(result["served"][epoch]) for result in results]
        assert (receipt["rows"], receipt["rows_seen"], receipt["repeated"]) == (rows, rows, 0)
        assert receipt["is_whole"]
    assert [result["scores"]["rows_seen"] for result in results] == [sizes[1]] * world_size
    if rows > 2:
        assert results[0]["served"][0] != results[0]["served"][1]


def test_the_order_repeats_per_seed(model: Path, tmp_path: Path) -> None:
    first, again, other = (
        run_gloo(served_on_rank, 2, tmp_path, make_config(model, seed=seed), tmp_path / "run", SIZES)
        for seed in (0, 0, 1)
    )
    assert [r["served"] for r in first] == [r["served"] for r in again]
    assert [r["served"] for r in first] != [r["served"] for r in other]


def test_a_row_seen_twice_or_never_is_noticed() -> None:
    import torch

    from raytrain_bert.receipt import Receipt

    receipt = Receipt(3, 0, 1, torch.device("cpu"))
    receipt.add(np.array([0, 2]))
    with pytest.raises(AssertionError, match="2 of 3 rows"):
        receipt.close(0, is_whole=True)
    receipt = Receipt(3, 0, 1, torch.device("cpu"))
    receipt.add(np.array([0, 1, 2, 1]))
    with pytest.raises(AssertionError, match="1 rows were seen more than once"):
        receipt.close(0, is_whole=True)
