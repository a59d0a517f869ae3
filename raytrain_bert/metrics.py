"""Scores of an evaluation, exact for any number of workers."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics.functional.classification import multiclass_confusion_matrix

from raytrain_bert.scores import METRICS

IGNORED = -1


class EvaluationMetrics:
    """Counts the rows of one rank; the counts of all ranks are summed once, and only then divided."""

    def __init__(self, num_classes: int, device: torch.device | str) -> None:
        self.num_classes = num_classes
        self._counts = torch.zeros((num_classes, num_classes), dtype=torch.int64, device=device)
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, rows, rows with a NaN logit
        self._confusion: Tensor | None = None

    def update(self, logits: Tensor, labels: Tensor, loss_sum: Tensor) -> None:
        """Count some rows: logits (rows, classes), labels (rows,), and the sum of their losses ()."""
        # argmax would make a NaN a prediction like any other.
        broken = logits.isnan().any(dim=1)
        self._counts += multiclass_confusion_matrix(
            logits.argmax(dim=1),
            labels.masked_fill(broken, IGNORED),
            self.num_classes,
            ignore_index=IGNORED,
            validate_args=False,
        )
        rows = torch.full_like(loss_sum, len(labels), dtype=torch.float64)
        self._sums += torch.stack([loss_sum.detach().double(), rows, broken.sum().double()])

    def compute(self) -> dict[str, float | int]:
        """Scores over the rows of all ranks and their number `rows_seen`; every rank calls it, with rows or without.

        NaN where there are no rows. Any NaN logit makes every score NaN, so that no broken model is ever the best.
        """
        # One exchange for everything; float64 holds counts up to 2 ** 53 exactly.
        total = torch.cat([self._counts.double().flatten(), self._sums])
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(total)
        *_, loss_sum, rows, broken = (values := total.cpu()).tolist()
        self._confusion = values[:-3].long().reshape(self.num_classes, self.num_classes)
        scores = _scores(self._confusion.numpy()) if rows and not broken else dict.fromkeys(METRICS, math.nan)
        return scores | {"loss": loss_sum / rows if rows else math.nan, "rows_seen": int(rows)}

    def confusion(self) -> Tensor:
        """Counts (true class, predicted class) over all ranks, as of the last `compute`; no exchange.

        A row with a NaN logit is in none of its cells.
        """
        assert self._confusion is not None, "confusion() comes after compute()"
        return self._confusion


def _scores(confusion: NDArray[np.int64]) -> dict[str, float]:
    """Scores as scikit-learn defines them, in float64.

    torchmetrics counts but does not divide: it would in float32, which keeps seven digits of the scores.
    F1 is averaged over the classes that are in labels or predictions; MCC (Gorodkin 2004) is 0 where it is 0 / 0.
    """
    true, predicted = confusion.sum(axis=1).astype(np.float64), confusion.sum(axis=0).astype(np.float64)
    hits, rows = np.diag(confusion).astype(np.float64), true.sum()
    present = true + predicted > 0
    f1 = 2 * hits[present] / (true + predicted)[present]
    spread = (rows**2 - predicted @ predicted) * (rows**2 - true @ true)
    return {
        "accuracy": float(hits.sum() / rows),
        "macro_f1": float(np.average(f1)),
        "weighted_f1": float(np.average(f1, weights=true[present])),
        "mcc": float((hits.sum() * rows - true @ predicted) / np.sqrt(spread)) if spread else 0.0,
    }
