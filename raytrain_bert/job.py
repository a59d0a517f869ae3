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
