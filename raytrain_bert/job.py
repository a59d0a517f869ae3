"""What the driver hands to every worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raytrain_bert.config.schema import Config
from raytrain_bert.progress.board import BoardClient

DATASET = "rows"

Purpose = Literal["run", "trial", "finish", "soup"]
"""run: train, test and write the best model. trial: train, and leave the test to the one that wins. finish: test and
write the best model of what has been trained. soup: average the weights of trained models."""


@dataclass(frozen=True)
class Job:
    """One run, as every worker sees it."""

    config: Config
    label_names: tuple[str, ...]
    max_length: int
    threads: int
    use_gpu: bool
    run_folder: str
    board: BoardClient
    files: tuple[str, ...] = ()
    """Names of the files that the rows came from."""
    class_weights: tuple[float, ...] | None = None
    """Weight of each class in the training loss, in the order of `label_names`; None for all alike."""
    purpose: Purpose = "run"
    on_validation_too: bool = False
    """Train on the validation rows as well; the last step is then the best one."""
    stop_after_epochs: float | None = None
    """End there, on the learning rates of the whole schedule; None: with its end."""
    ingredients: tuple[str, ...] = ()
    """Checkpoint folders whose weights a soup may take, the best first."""
