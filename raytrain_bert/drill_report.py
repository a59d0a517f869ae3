"""What a drill has shown: each disturbed run against the undisturbed one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from raytrain_bert.progress.format import duration

LARGEST_DIFFERENCE = 1e-3
"""Relative difference of loss or gradient norm up to which a curve counts as the same (kernels of GPUs vary)."""
NOT_COMPARED = ("seconds", "straggler_gap", "rows_per_rank")


@dataclass(frozen=True)
class Outcome:
    """One disturbed run."""

    fault: str
    """What was done to it."""
    survived: bool
    """Whether it came to its end."""
    note: str = ""
    """Why it did not, or what else there is to say."""
    repeated: int | None = None
    """Steps that were trained again."""
    lost: int | None = None
    """Steps that are in the undisturbed run's metrics and not in this one's."""
    difference: float | None = None
    """Largest relative difference of a figure of any step, validation or test; 0 for bit for bit."""
    seconds: float | None = None
    """From the fault to the first step after it."""

    @property
    def passed(self) -> bool:
        """Whether the promise was kept."""
        return self.survived and not self.lost and self.difference is not None and self.difference <= LARGEST_DIFFERENCE


def read_records(run_folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Records of metrics.jsonl by kind and step."""
    lines = (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return {(record["kind"], record["step"]): record for record in records}


def compare(
    expected: Mapping[tuple[str, int], Mapping[str, Any]], got: Mapping[tuple[str, int], Mapping[str, Any]]
) -> tuple[int, float]:
    """Steps that are missing, and the largest relative difference of any figure that both have."""
    missing = sum(kind == "train" for kind, _ in expected.keys() - got.keys())
    return missing, max(
        (_difference(expected[key], got[key]) for key in expected.keys() & got.keys()), default=math.inf
    )


def _difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """Largest relative difference between two records."""
    largest = 0.0
    for key in a.keys() - set(NOT_COMPARED):
        x, y = a[key], b.get(key)
        if x == y:
            continue
        if not (isinstance(x, (int, float)) and isinstance(y, (int, float))):
            return math.inf
        largest = max(largest, abs(x - y) / max(abs(x), abs(y)))
    return largest


def table(outcomes: Sequence[Outcome]) -> Table:
    """One line a fault."""
    shown = Table(box=None, pad_edge=False, header_style="dim")
    shown.add_column("fault")
    for title in ("survived", "repeated", "lost", "curve", "recovery"):
        shown.add_column(title, justify="right")
    shown.add_column("")
    for outcome in outcomes:
        shown.add_row(
            outcome.fault,
            "yes" if outcome.survived else "NO",
            _steps(outcome.repeated),
            _steps(outcome.lost),
            curve(outcome.difference),
            "-" if outcome.seconds is None else duration(outcome.seconds),
            outcome.note,
        )
    return shown


def curve(difference: float | None) -> str:
    """How well two curves agree, in words."""
    if difference is None:
        return "-"
    return "bit for bit" if difference == 0 else "another" if math.isinf(difference) else f"within {difference:.0e}"


def to_json(outcomes: Sequence[Outcome], **more: Any) -> str:
    """Everything, for drill.json."""
    told = [asdict(outcome) | {"passed": outcome.passed} for outcome in outcomes]
    for outcome in told:
        if outcome["difference"] is not None and not math.isfinite(outcome["difference"]):
            outcome["difference"] = None
    return json.dumps(more | {"outcomes": told}, indent=1, allow_nan=False) + "\n"


def _steps(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"
