"""What the driver hands to every worker, and the function that Ray Train calls there.

The driver and Ray's controller import this module alone: torch and transformers are loaded by the workers, which
brings them up some eight seconds sooner on two cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


def train_loop_per_worker(config: dict[str, Any]) -> dict[str, Any]:
    """Run the training loop on this worker.

    Args:
        config: {"job": Job}; the token rows come as the Ray dataset shard "rows".
    """
    from raytrain_bert.loop import train

    job: Job = config["job"]
    return train(job)
