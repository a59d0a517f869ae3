"""How strongly each searched setting goes with the score."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from raytrain_bert.sweep.records import Trial
from raytrain_bert.sweep.space import Space

FEWEST_TRIALS = 4


def importances(trials: Sequence[Trial], space: Space, metric: str) -> dict[str, float]:
    """Strength of the relation of each setting to the best score, 0 to 1; nothing below FEWEST_TRIALS trials.

    Numbers: the absolute rank correlation (Spearman 1904). Choices: the correlation ratio (Fisher 1925), the root of
    the share of the scores' variance that lies between the choices. Settings with one value only are left out.
    """
    found: dict[str, float] = {}
    for domain in space.domains:
        there = [trial for trial in trials if domain.key in trial.sample and trial.best_score is not None]
        if len(there) < FEWEST_TRIALS:
            continue
        scores = pd.Series([trial.best_score for trial in there], dtype=float)
        values = [trial.sample[domain.key] for trial in there]
        numeric = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
        strength = _rank_correlation(values, scores) if numeric else _correlation_ratio(values, scores)
        if strength is not None:
            found[domain.key] = strength
    return found


def _rank_correlation(values: Sequence[float], scores: pd.Series) -> float | None:
    ranks, score_ranks = pd.Series(values, dtype=float).rank(), scores.rank()
    if ranks.nunique() < 2 or score_ranks.nunique() < 2:
        return None if ranks.nunique() < 2 else 0.0
    return abs(float(np.corrcoef(ranks, score_ranks)[0, 1]))


def _correlation_ratio(values: Sequence[object], scores: pd.Series) -> float | None:
    groups = scores.groupby([str(value) for value in values])
    if groups.ngroups < 2:
        return None
    total = float(((scores - scores.mean()) ** 2).sum())
    between = float((groups.size() * (groups.mean() - scores.mean()) ** 2).sum())
    return (between / total) ** 0.5 if total else 0.0
