"""What the driver hands to every worker."""

from __future__ import annotations

from dataclasses import dataclass

from raytrain_bert.config.schema import Config
from raytrain_bert.progress.board import BoardClient

DATASET = "rows"


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
