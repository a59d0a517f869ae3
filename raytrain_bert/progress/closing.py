"""The closing table: scores, where the time went, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from raytrain_bert.progress.format import SCORES, amount, duration, epoch_of, rows_of, score
from raytrain_bert.progress.meter import Interval

KEY_WIDTH = 14
COLUMN_WIDTH = 12
LEAST_SECONDS, LEAST_SHARE = 0.05, 0.005
"""Shorter parts of the run are not worth telling."""


@dataclass(frozen=True)
class Summary:
    """What the closing table says beside what the events told."""

    run_folder: str
    status: str = "finished"
    command: str | None = None
    """What the user may run next; shown on a line of its own, never broken."""
    command_label: str = "use the model"
    best: Mapping[str, Any] | None = None
    """epoch, step, metric and score of the best validation; None for what the events told."""
    test: Mapping[str, Any] | None = None
    """Scores of the test; None for what the events told."""
    receipts: Sequence[Mapping[str, Any]] = ()
    """Of each epoch: rows, rows_seen, is_whole."""


def score_table(columns: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Text]:
    """One line a score, one column a split."""
    if not columns:
        return []
    cells = [[label, *(score(scores.get(key)) for _, scores in columns)] for key, label in SCORES.items()]
    cells.append(["rows", *(rows_of(scores) or "-" for _, scores in columns)])
    lines = [Text(" " * KEY_WIDTH + _columns([name for name, _ in columns]), style="dim")]
    return lines + [Text.assemble((label.ljust(KEY_WIDTH), "dim"), _columns(values)) for label, *values in cells]


def best_row(best: Mapping[str, Any], num_epochs: int | None) -> tuple[str, str]:
    """Which checkpoint is the best, and why."""
    name = SCORES.get(best["metric"], best["metric"])
    where = f"{epoch_of(best['epoch'], num_epochs)}, step {best['step']:,}"
    return "best", f"{where}: validation {name} {score(best['score'])}"


def receipt_row(receipts: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """How many of the training rows each epoch has seen."""
    whole = [receipt for receipt in receipts if receipt["is_whole"]]
    part = [receipt for receipt in receipts if not receipt["is_whole"]]
    words = []
    if whole:
        epochs = "" if len(whole) == 1 else f" in each of {len(whole)} epochs"
        words.append(f"{rows_of(whole[0])} rows{epochs}, each once")
    words += [f"{rows_of(receipt)} rows of epoch {receipt['epoch'] + 1}, each once" for receipt in part]
    return [("trained on", "; ".join(words))] if words else []


def time_row(parts: Mapping[str, float], seconds: float) -> list[tuple[str, str]]:
    """How the run's time divides; what belongs to no part is the rest."""
    whole = {**parts, "rest": seconds - sum(parts.values())}
    least = max(LEAST_SECONDS, LEAST_SHARE * seconds)
    shown = [f"{name} {duration(spent)}" for name, spent in whole.items() if spent >= least]
    return [("time", ", ".join(shown))] if shown else []


def speed_row(total: Interval) -> list[tuple[str, str]]:
    """Rates over all of the training; nothing where nothing was trained."""
    rows, tokens = total.per_second(total.rows), total.per_second(total.tokens)
    if rows is None or tokens is None:
        return []
    return [("speed", f"{amount(rows)} rows/s, {amount(tokens)} tokens/s in training")]


def _columns(values: Sequence[str]) -> str:
    return "".join(value.rjust(COLUMN_WIDTH) for value in values)
