"""What is known of each trial, and the files of a sweep that hold it."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from raytrain_bert.config.errors import RunFolderError
from raytrain_bert.run_folder import RunFolder, StateFile
from raytrain_bert.scores import METRICS, is_better

Status = Literal["running", "trained", "stopped", "failed", "unfinished"]
FULL = "trained to the end"
"""Why a trial ended that nothing ended early."""
ENDED: tuple[Status, ...] = ("trained", "stopped", "failed")


@dataclass
class Trial:
    """One trial: a training run with a sample of its own."""

    number: int
    """From 1."""
    sample: dict[str, Any]
    """Sampled values by dotted key; with pbt, the present ones."""
    status: Status = "running"
    why: str = ""
    """Why it ended."""
    effective: dict[str, Any] = field(default_factory=dict)
    """The sampled settings as read back from the live optimizer and model."""
    epoch: float | None = None
    """Epochs done at the last validation."""
    step: int | None = None
    score: float | None = None
    """The chosen metric at the last validation; None for none or NaN."""
    best_score: float | None = None
    """The chosen metric at the best validation, whose checkpoint is kept."""
    best_epoch: float | None = None
    best_step: int | None = None
    seconds: float = 0.0
    """Wall time, from the start of its process to its end."""
    gpu_seconds: float = 0.0
    rows_per_second: float | None = None
    path: str = ""
    """Its run folder, inside the sweep's."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """pbt: what it took over, from which trial, at which step."""

    def at(self, unit: str) -> float | None:
        """How far it had got at its last validation, in epochs or steps."""
        return self.step if unit == "steps" else self.epoch

    def best_at(self, unit: str) -> float | None:
        """How far it had got at its best validation, in epochs or steps."""
        return self.best_step if unit == "steps" else self.best_epoch

    @property
    def has_ended(self) -> bool:
        """Whether there is nothing left to do for it."""
        return self.status in ENDED


def best_of(trials: Iterable[Trial], metric: str) -> Trial | None:
    """The trial with the best epoch; of equal ones the first. Failed ones and those without a number never win."""
    best: Trial | None = None
    for trial in sorted(trials, key=lambda trial: trial.number):
        if trial.status == "failed" or trial.best_score is None:
            continue
        if best is None or is_better(metric, trial.best_score, best.best_score):
            best = trial
    return best


def ranking(trials: Iterable[Trial], metric: str) -> list[Trial]:
    """Best first; those without a score last."""
    worst = -math.inf if METRICS[metric] == "max" else math.inf
    sign = -1 if METRICS[metric] == "max" else 1

    def key(trial: Trial) -> tuple[bool, float, int]:
        failed = trial.status == "failed" or trial.best_score is None
        return failed, sign * (worst if trial.best_score is None else trial.best_score), trial.number

    return sorted(trials, key=key)


class SweepFolder:
    """Paths and files of SWEEP; only the sweep's driver writes them."""

    def __init__(self, path: Path) -> None:
        """Nothing is read or made."""
        self.path = path
        self.state = StateFile(path / "sweep.json")
        """sweep.json: status, provenance, winner."""
        self.config_path = path / "config.yaml"
        self.jsonl_path = path / "trials.jsonl"
        self.csv_path = path / "trials.csv"
        self.best_path = path / "best.yaml"
        self.page_path = path / "sweep.html"
        self.log_path = path / "logs" / "ray.log"
        self.error_path = path / "logs" / "error.txt"
        self.tune_path = path / ".tune"
        """Ray Tune's own files; gone after the search, never read again."""
        self.stop_path = path / ".stop"
        """While it is there, trials that are ended save a checkpoint first."""
        self.clones_path = path / ".clones"
        """pbt: checkpoints that other trials may take over."""
        self._lock = threading.Lock()

    def trial(self, number: int) -> RunFolder:
        """Run folder of a trial."""
        return RunFolder(self.path / "trials" / f"{number:04d}")

    def read(self) -> list[Trial]:
        """The trials as they were written down.

        Raises:
            RunFolderError: the file is not readable.
        """
        if not self.jsonl_path.is_file():
            return []
        known = {f.name for f in fields(Trial)}
        try:
            lines = self.jsonl_path.read_text(encoding="utf-8").splitlines()
            records = [json.loads(line) for line in lines]
            return [Trial(**{key: value for key, value in record.items() if key in known}) for record in records]
        except (ValueError, TypeError, AttributeError) as error:
            raise RunFolderError(f"{self.jsonl_path}: not readable ({error}).") from None

    def write(self, trials: Sequence[Trial], keys: Sequence[str], metric: str) -> None:
        """Write trials.jsonl and trials.csv; each file is whole at any moment."""
        with self._lock:
            text = "".join(json.dumps(asdict(trial), allow_nan=False, ensure_ascii=False) + "\n" for trial in trials)
            replace_file(self.jsonl_path, text)
            replace_file(self.csv_path, to_csv(trials, keys, metric))


COLUMNS = ("status", "why", "score", "best_score", "best_epoch", "best_step", "epoch", "step", "seconds",
           "gpu_seconds", "rows_per_second", "path")  # fmt: skip


def to_csv(trials: Sequence[Trial], keys: Sequence[str], metric: str) -> str:
    """A table of the trials: number, sampled values, effective values, and the rest."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["trial", *keys, *(f"effective:{key}" for key in keys), "metric", *COLUMNS])
    for trial in trials:
        sampled = [_cell(trial.sample.get(key, "")) for key in keys]
        effective = [_cell(trial.effective.get(key, "") if key in trial.sample else "") for key in keys]
        rest = [_cell(getattr(trial, column)) for column in COLUMNS]
        writer.writerow([trial.number, *sampled, *effective, metric, *rest])
    return file.getvalue()


def _cell(value: Any) -> Any:
    """A value as the table has it; None is an empty cell."""
    if value is None:
        return ""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, Mapping)) else value


def replace_file(path: Path, text: str) -> None:
    """Write a file that is whole at any moment."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
