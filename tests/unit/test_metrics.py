"""Scores of one process against scikit-learn and torchmetrics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as reference
from torchmetrics.functional.classification import multiclass_f1_score

from raytrain_bert.metrics import EvaluationMetrics
from raytrain_bert.scores import METRICS, is_better


def logits_for(predictions: list[int], num_classes: int) -> torch.Tensor:
    noise = torch.rand(len(predictions), num_classes, generator=torch.Generator().manual_seed(0))
    return noise + 2 * torch.nn.functional.one_hot(torch.tensor(predictions, dtype=torch.int64), num_classes)


def sklearn_scores(labels: list[int], predictions: list[int]) -> dict[str, float]:
    return {
        "accuracy": reference.accuracy_score(labels, predictions),
        "macro_f1": reference.f1_score(labels, predictions, average="macro", zero_division=0),
        "weighted_f1": reference.f1_score(labels, predictions, average="weighted", zero_division=0),
        "mcc": reference.matthews_corrcoef(labels, predictions),
    }


def scored(labels: list[int], predictions: list[int], num_classes: int, rows: int = 7) -> EvaluationMetrics:
    metrics = EvaluationMetrics(num_classes, "cpu")
    logits = logits_for(predictions, num_classes)
    for some, targets in zip(logits.split(rows), torch.tensor(labels).split(rows), strict=True):
        metrics.update(some, targets, torch.nn.functional.cross_entropy(some, targets, reduction="sum"))
    return metrics


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 6).flatmap(
        lambda classes: st.tuples(
            st.just(classes),
            st.lists(st.tuples(st.integers(0, classes - 1), st.integers(0, classes - 1)), min_size=1, max_size=60),
        )
    )
)
@pytest.mark.filterwarnings("ignore:A single label was found")
def test_scores_equal_scikit_learn_to_the_last_digit(case):
    num_classes, rows = case
    labels, predictions = (list(column) for column in zip(*rows, strict=True))
    metrics = scored(labels, predictions, num_classes)
    scores = metrics.compute()
    assert {name: scores[name] for name in METRICS if name != "loss"} == sklearn_scores(labels, predictions)
    assert scores["rows_seen"] == len(rows)
    expected = reference.confusion_matrix(labels, predictions, labels=range(num_classes))
    assert metrics.confusion().tolist() == expected.tolist()
    assert metrics.confusion().dtype == torch.int64


def test_a_class_that_appears_nowhere_is_left_out_of_macro_f1():
    scores = scored([0, 0, 1, 1], [0, 1, 1, 1], num_classes=5).compute()
    assert scores["macro_f1"] == reference.f1_score([0, 0, 1, 1], [0, 1, 1, 1], average="macro")
    by_torchmetrics = multiclass_f1_score(torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 1, 1]), 5, average="macro")
    assert scores["macro_f1"] == pytest.approx(float(by_torchmetrics), abs=1e-6)


def test_a_class_only_predicted_counts_in_macro_f1_as_zero():
    scores = scored([0, 0, 0, 0], [0, 0, 2, 0], num_classes=3).compute()
    assert scores["macro_f1"] == (2 * 3 / (4 + 3)) / 2


@pytest.mark.parametrize(
    ("labels", "predictions"), [([1, 1, 1], [1, 1, 1]), ([0, 1, 1], [1, 1, 1]), ([1, 1, 1], [0, 1, 1]), ([0], [0])]
)
def test_mcc_is_zero_where_one_class_is_all_there_is(labels, predictions):
    assert scored(labels, predictions, num_classes=2).compute()["mcc"] == 0.0


def test_loss_is_the_mean_over_rows_not_over_updates():
    metrics = EvaluationMetrics(2, "cpu")
    for rows, loss in ((3, 6.0), (1, 10.0)):
        metrics.update(torch.zeros(rows, 2), torch.zeros(rows, dtype=torch.int64), torch.tensor(loss))
    assert metrics.compute()["loss"] == 4.0


def test_loss_is_summed_in_float64():
    metrics = EvaluationMetrics(2, "cpu")
    losses = [1e8, 1.0, 1.0, 1.0]  # float32 would lose the ones
    for loss in losses:
        metrics.update(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), torch.tensor(loss))
    assert metrics.compute()["loss"] == math.fsum(losses) / 4


def test_half_precision_logits_are_scored_too():
    metrics = EvaluationMetrics(3, "cpu")
    metrics.update(logits_for([0, 2, 1], 3).bfloat16(), torch.tensor([0, 2, 2]), torch.tensor(1.0).bfloat16())
    assert metrics.compute()["accuracy"] == 2 / 3


def test_one_nan_logit_makes_every_score_nan():
    metrics = scored([0, 1, 2, 2], [0, 1, 2, 2], num_classes=3)
    logits = torch.tensor([[0.0, math.nan, 1.0]])
    metrics.update(logits, torch.tensor([1]), torch.tensor(math.nan))
    scores = metrics.compute()
    assert all(math.isnan(scores[name]) for name in METRICS)
    assert scores["rows_seen"] == 5
    assert not any(is_better(name, float(scores[name]), None) for name in METRICS)
    assert int(metrics.confusion().sum()) == 4


def test_no_rows_give_nan_and_no_error():
    metrics = EvaluationMetrics(3, "cpu")
    scores = metrics.compute()
    assert scores["rows_seen"] == 0
    assert all(math.isnan(scores[name]) for name in METRICS)
    assert metrics.confusion().tolist() == np.zeros((3, 3)).tolist()


def test_computing_twice_does_not_count_twice():
    metrics = scored([0, 1, 1], [0, 1, 0], num_classes=2)
    assert metrics.compute() == metrics.compute()
    metrics.update(logits_for([1], 2), torch.tensor([1]), torch.tensor(0.5))
    assert metrics.compute()["rows_seen"] == 4


@pytest.mark.parametrize(
    ("metric", "new", "old", "min_delta", "expected"),
    [
        ("accuracy", 0.9, 0.8, 0.0, True),
        ("accuracy", 0.8, 0.8, 0.0, False),
        ("accuracy", 0.7, 0.8, 0.0, False),
        ("mcc", -0.1, None, 0.0, True),
        ("macro_f1", 0.805, 0.8, 0.01, False),
        ("weighted_f1", 0.82, 0.8, 0.01, True),
        ("loss", 0.4, 0.5, 0.0, True),
        ("loss", 0.5, 0.5, 0.0, False),
        ("loss", 0.6, 0.5, 0.0, False),
        ("loss", 0.495, 0.5, 0.01, False),
        ("loss", math.inf, None, 0.0, True),
        ("loss", math.nan, None, 0.0, False),
        ("accuracy", math.nan, 0.1, 0.0, False),
        ("loss", 0.5, math.nan, 0.0, True),
    ],
)
def test_better_goes_in_the_direction_of_the_metric(metric, new, old, min_delta, expected):
    assert is_better(metric, new, old, min_delta) is expected
