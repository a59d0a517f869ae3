"""How many trials run at a time: as many as the cluster has room for, and never more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raytrain_bert.config.errors import ConfigError, ResourceError
from raytrain_bert.config.schema import ScalingSettings
from raytrain_bert.config.sweep import SweepSettings
from raytrain_bert.runtime import CPUS_PER_GPU_WORKER, Node, WorkerPlan

SHARES_ON_CPU = 4
"""Workers that the CPUs of a cluster without GPUs are shared by, where nothing is set."""
HEAD_MEMORY = 64 * 1024**2
"""What a trial with several workers holds itself, in bytes: Ray Tune wants something, and the CPUs are the workers'."""


@dataclass(frozen=True)
class TrialPlan:
    """What each trial gets, and how many there are at a time."""

    workers: WorkerPlan
    """Of one trial; 0 workers: it trains in its own process."""
    gpus: float
    """Of one trial, all its workers together."""
    cpus: int
    """Of one trial, all its workers together."""
    concurrent: int

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray Tune reserves for the process of a trial; its workers reserve theirs themselves."""
        if self.workers.num_workers:
            return {"memory": HEAD_MEMORY}
        return {"CPU": float(self.cpus)} | ({"GPU": self.gpus} if self.gpus else {})

    def told(self) -> str:
        """In words."""
        each = f"{self.cpus} CPU{'' if self.cpus == 1 else 's'}"
        if self.gpus:
            each += f" and {self.gpus:g} GPU{'' if self.gpus == 1 else 's'}"
        workers = self.workers.num_workers
        if workers:
            each += f" in {workers} worker{'' if workers == 1 else 's'}"
        return f"{self.concurrent} at a time, each with {each}"


def plan_trials(
    scaling: ScalingSettings, sweep: SweepSettings, nodes: Sequence[Node], num_trials: int | None
) -> TrialPlan:
    """Share the cluster out.

    Args:
        scaling: workers of a trial.
        sweep: most trials at a time, share of a GPU.
        nodes: the machines.
        num_trials: trials in all; None for no limit.

    Raises:
        ConfigError: what is asked for does not go together.
        ResourceError: there is no room for one trial.
    """
    if scaling.is_elastic:
        raise ConfigError("scaling.num_workers MIN..MAX is for one run; a sweep's trials need a fixed number.")
    workers = max(scaling.num_workers if isinstance(scaling.num_workers, int) else 1, 1)
    if sweep.gpus_per_trial is not None and workers > 1:
        raise ConfigError(f"sweep.gpus_per_trial is for trials of one worker, and scaling.num_workers is {workers}.")
    cpus, gpus = int(sum(node.cpus for node in nodes)), sum(node.gpus for node in nodes)
    use_gpu = gpus > 0 if scaling.use_gpu is None else scaling.use_gpu
    gpu_share = (sweep.gpus_per_trial or 1.0) if use_gpu else 0.0
    if use_gpu and _room(nodes, 0, gpu_share) < workers:
        raise ResourceError(
            f"A trial needs {workers * gpu_share:g} GPU{'' if workers * gpu_share == 1 else 's'}; "
            f"{_there(nodes)}. Lower --scaling.num-workers, or search on CPU with --no-scaling.use-gpu."
        )
    most = min(sweep.max_concurrent or num_trials or SHARES_ON_CPU, num_trials or SHARES_ON_CPU)
    cpus_each = scaling.cpus_per_worker
    if cpus_each is None:
        if use_gpu:
            cpus_each = max(1, min(CPUS_PER_GPU_WORKER, cpus // max(_room(nodes, 0, gpu_share), 1)))
        else:
            cpus_each = max(1, cpus // min(SHARES_ON_CPU, max(most * workers, 1)))
            while cpus_each > 1 and _room(nodes, cpus_each, 0) < min(SHARES_ON_CPU, most * workers):
                cpus_each -= 1
    room = _room(nodes, cpus_each, gpu_share) // workers
    if room < 1:
        raise ResourceError(
            f"A trial of {workers} worker{'' if workers == 1 else 's'} with {cpus_each} "
            f"CPU{'' if cpus_each == 1 else 's'} each has no room; {_there(nodes)}. Lower --scaling.num-workers"
            + ("." if scaling.cpus_per_worker is None else " or --scaling.cpus-per-worker.")
        )
    concurrent = min(room, sweep.max_concurrent or room, num_trials or room)
    in_its_process = workers == 1
    return TrialPlan(
        workers=WorkerPlan(0 if in_its_process else workers, use_gpu, cpus_each),
        gpus=workers * gpu_share,
        cpus=workers * cpus_each,
        concurrent=concurrent,
    )


def all_workers(scaling: ScalingSettings, plan: TrialPlan) -> ScalingSettings:
    """Scaling of the final training: every GPU of the cluster, or two workers on CPU."""
    update: dict[str, Any] = {"num_workers": None, "cpus_per_worker": None, "use_gpu": plan.workers.use_gpu}
    return scaling.model_copy(update=update)


def held_too_much(plan: TrialPlan, running: int, before: dict[str, float]) -> str | None:
    """What is held of CPUs and GPUs beyond the trials that run; None for nothing.

    Args:
        plan: what a trial holds.
        running: trials that run.
        before: what was free before the first trial.
    """
    import ray

    free = ray.available_resources()
    held = []
    for name, each in (("CPU", plan.cpus), ("GPU", plan.gpus)):
        extra = before.get(name, 0.0) - running * each - free.get(name, 0.0)
        if each and extra > 1e-6:
            held.append(f"{extra:g} {name}")
    return " and ".join(held) or None


def _room(nodes: Sequence[Node], cpus: int, gpus: float) -> int:
    """How many workers fit, each whole on one node; a share of a GPU does not span two."""
    room = 0
    for node in nodes:
        by_cpu = math.inf if not cpus else node.cpus // cpus
        by_gpu = math.inf if not gpus else node.gpus * math.floor(1 / gpus + 1e-9)
        smaller = min(by_cpu, by_gpu)
        room += int(smaller) if math.isfinite(smaller) else 0
    return room


def _there(nodes: Sequence[Node]) -> str:
    cpus, gpus = int(sum(node.cpus for node in nodes)), int(sum(node.gpus for node in nodes))
    where = "this machine" if len(nodes) == 1 else f"the cluster of {len(nodes)} nodes"
    return f"{where} has {gpus} GPU{'' if gpus == 1 else 's'} and {cpus} CPU{'' if cpus == 1 else 's'}"
