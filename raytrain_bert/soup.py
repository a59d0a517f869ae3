"""Greedy soup: average the weights of several trained models as far as validation gets better.

Wortsman et al. 2022, "Model soups", recipe 1.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raytrain_bert.checkpoint import CheckpointStore, training_tensors
from raytrain_bert.parts import Parts
from raytrain_bert.scores import is_better

Evaluate = Callable[[], float]


def greedy_soup(parts: Parts, evaluate: Evaluate) -> dict[str, Any]:
    """Put the best soup of the job's ingredients into the model; all ranks call it together.

    Args:
        parts: of this worker; its job names the ingredients, the best first.
        evaluate: gives the chosen metric of the model as it is, the same on every rank.

    Returns:
        score of the soup, score of the first ingredient alone, and which ingredients went in, counted from 0.
    """
    metric = parts.config.train.best_metric
    tensors = training_tensors(parts.module, None, None)
    average: dict[str, Tensor] = {}
    chosen: list[int] = []
    best: float | None = None
    alone: float | None = None
    for number, folder in enumerate(parts.job.ingredients):
        path = Path(folder)
        CheckpointStore(path.parent).load(int(path.name.removeprefix("step-")), tensors)
        with torch.no_grad():
            candidate = {name: _mixed(average.get(name), tensor, len(chosen)) for name, tensor in tensors.items()}
            for name, tensor in tensors.items():
                tensor.copy_(candidate[name])
        score = evaluate()
        if number == 0:
            alone = score
        if number == 0 or is_better(metric, score, best):
            average, best = candidate, score
            chosen.append(number)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(average[name])
    return {"score": best, "alone": alone, "chosen": chosen}


def _mixed(average: Tensor | None, tensor: Tensor, count: int) -> Tensor:
    """The mean of `count` tensors with one more; what is no floating-point number stays as it is."""
    if average is None or not tensor.is_floating_point():
        return tensor.detach().clone()
    return (average * count + tensor.detach()) / (count + 1)
