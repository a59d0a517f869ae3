"""Scores over several processes equal scikit-learn's over all rows."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sklearn import metrics as reference

from raytrain_bert.metrics import EvaluationMetrics
from tests.distributed.gloo import run_gloo

NUM_CLASSES = 4


def make_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, labels and losses of 21 rows; the last class is neither a label nor a prediction."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, NUM_CLASSES - 1, (21,), generator=generator)
    logits = torch.randn(21, NUM_CLASSES, generator=generator) + 1.5 * torch.nn.functional.one_hot(labels, NUM_CLASSES)
    logits[:, -1] = -9.0
    return logits, labels, torch.nn.functional.cross_entropy(logits, labels, reduction="none")


def evaluate(rank: int, world_size: int, shares: list[list[int]]) -> tuple[dict[str, Any], list[list[int]]]:
    logits, labels, losses = make_rows()
    metrics = EvaluationMetrics(NUM_CLASSES, "cpu")
    for rows in torch.tensor(shares[rank], dtype=torch.int64).split(4):
        if len(rows):
            metrics.update(logits[rows], labels[rows], losses[rows].double().sum())
    return metrics.compute(), metrics.confusion().tolist()


@pytest.mark.parametrize("sizes", [(13, 8), (1, 15, 5), (9, 0, 12)], ids=["two", "three", "three-one-empty"])
def test_every_rank_has_the_scores_of_scikit_learn_over_all_rows(sizes: tuple[int, ...], tmp_path: Path) -> None:
    logits, labels, losses = make_rows()
    shares = [rows.tolist() for rows in torch.randperm(21, generator=torch.Generator().manual_seed(1)).split(sizes)]
    results = run_gloo(evaluate, len(sizes), tmp_path, shares)
    true, predicted = labels.tolist(), logits.argmax(dim=1).tolist()
    expected = {
        "accuracy": reference.accuracy_score(true, predicted),
        "macro_f1": reference.f1_score(true, predicted, average="macro"),
        "weighted_f1": reference.f1_score(true, predicted, average="weighted"),
        "mcc": reference.matthews_corrcoef(true, predicted),
        "loss": math.fsum(losses.tolist()) / 21,
        "rows_seen": 21,
    }
    confusion = reference.confusion_matrix(true, predicted, labels=range(NUM_CLASSES)).tolist()
    assert 0 < expected["mcc"] < 1
    assert results == [(expected, confusion)] * len(sizes)


def hang_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(600)
    dist.barrier()


def fail_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 gives up")
    dist.barrier()


def test_a_hang_ends_at_the_timeout(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="hang_on_rank_1 on 2 ranks"):
        run_gloo(hang_on_rank_1, 2, tmp_path, timeout=4.0)
    assert time.monotonic() - start < 60


def test_the_error_of_one_rank_is_raised(tmp_path: Path) -> None:
    # Rank 0 waits for rank 1, so it may be the first to fail: by the connection that breaks.
    with pytest.raises(Exception, match=r"rank 1 gives up|Connection (reset|closed)"):
        run_gloo(fail_on_rank_1, 2, tmp_path)
