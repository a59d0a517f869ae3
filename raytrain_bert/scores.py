"""The metrics of an evaluation by name, and which of two scores is better."""

from __future__ import annotations

import math

# Whether the largest or the smallest value is the best one.
METRICS: dict[str, str] = {"accuracy": "max", "macro_f1": "max", "weighted_f1": "max", "mcc": "max", "loss": "min"}


def is_better(metric: str, new: float | None, old: float | None, min_delta: float = 0.0) -> bool:
    """Whether `new` beats `old` by more than `min_delta`; NaN and None beat nothing, any number beats them."""
    if new is None or math.isnan(new):
        return False
    if old is None or math.isnan(old):
        return True
    return new > old + min_delta if METRICS[metric] == "max" else new < old - min_delta
