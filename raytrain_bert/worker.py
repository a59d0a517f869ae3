"""The function that Ray Train calls on every worker.

The driver and Ray's controller import this module and not the loop: torch and transformers are loaded by the workers
alone, which brings them up some eight seconds sooner on two cores.
"""

from __future__ import annotations

from typing import Any

from raytrain_bert.job import Job


def train_loop_per_worker(config: dict[str, Any]) -> dict[str, Any]:
    """Run the training loop on this worker.

    Args:
        config: {"job": Job}; the token rows come as the Ray dataset shard "rows".
    """
    from raytrain_bert.loop import train

    job: Job = config["job"]
    return train(job)
