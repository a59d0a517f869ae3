"""Ray, the machine and its devices: what there is, what a run asks for, and whether the two fit."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from raytrain_bert.config.errors import ConfigError, ResourceError
from raytrain_bert.config.schema import ScalingSettings

CPUS_PER_GPU_WORKER = 4
DASHBOARD_MODULES = ("aiohttp", "aiohttp_cors", "opencensus", "opentelemetry", "prometheus_client")
"""What Ray's dashboard needs beside Ray (ray.dashboard.optional_deps)."""
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
SECONDS_FOR_AN_ANSWER = 10
TRACK_RUNS = "RAY_TRAIN_ENABLE_STATE_TRACKING"


@dataclass(frozen=True)
class Node:
    """CPUs and GPUs of one machine."""

    cpus: float
    gpus: float


@dataclass(frozen=True)
class WorkerPlan:
    """Workers of a run and what each one gets."""

    num_workers: int
    """0: the loop runs in the calling process."""
    use_gpu: bool
    cpus_per_worker: int
    min_workers: int | None = None
    """Fewest workers of elastic training, of which `num_workers` are the most; None where the number is fixed."""

    @property
    def backend(self) -> str:
        """torch.distributed backend."""
        return "nccl" if self.use_gpu else "gloo"


def cluster_address(settings: ScalingSettings) -> str | None:
    """Address of the cluster to join, None for a local Ray."""
    address = settings.address or os.environ.get("RAY_ADDRESS")
    return None if address in (None, "", "local") else address


def local_node() -> Node:
    """This machine, without starting anything: CPUs that this process may use, visible GPUs."""
    import torch

    return Node(cpus=usable_cpus(), gpus=torch.cuda.device_count())


def usable_cpus() -> int:
    """CPUs this process may use: affinity and the container's quota."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        if quota != "max":
            cpus = min(cpus, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return cpus


def cluster_nodes() -> list[Node]:
    """Machines of the Ray cluster that this process is connected to."""
    import ray

    return [
        Node(cpus=node["Resources"].get("CPU", 0), gpus=node["Resources"].get("GPU", 0))
        for node in ray.nodes()
        if node["Alive"]
    ]


def plan_workers(settings: ScalingSettings, nodes: Sequence[Node]) -> WorkerPlan:
    """Fill in what the settings leave open, and refuse what these nodes can never give.

    Raises:
        ResourceError: says what was asked for, what is there and what to change.
    """
    cpus, gpus = int(sum(node.cpus for node in nodes)), int(sum(node.gpus for node in nodes))
    use_gpu = gpus > 0 if settings.use_gpu is None else settings.use_gpu
    low, high = settings.worker_range or (None, None)
    if low is None or high is None:
        low = high = max(1, gpus if use_gpu else min(2, cpus))
    wanted = max(low, 1)
    there = _what_is_there(nodes)
    if use_gpu and gpus < wanted:
        fewer = f"Use --scaling.num-workers {gpus}, or train" if gpus else "Train"
        raise ResourceError(
            f"{_asked_for(wanted, ' with a GPU each')}; {there}. "
            f"{fewer} on CPU with --no-scaling.use-gpu --scaling.num-workers {max(1, min(2, cpus))}."
        )
    gpus_each = 1 if use_gpu else 0
    if settings.cpus_per_worker is not None:
        cpus_each = settings.cpus_per_worker
    else:
        cpus_each = max(1, min(cpus // max(high, 1), CPUS_PER_GPU_WORKER if use_gpu else cpus))
        while cpus_each > 1 and _room(nodes, cpus_each, gpus_each) < low:
            cpus_each -= 1
    room = _room(nodes, cpus_each, gpus_each)
    if low > room:
        raise ResourceError(
            f"{_asked_for(low, ' with ' + _count(cpus_each, 'CPU') + ' each')}; {there}. "
            f"There is room for {room}. Lower --scaling.num-workers"
            + ("." if settings.cpus_per_worker is None else " or --scaling.cpus-per-worker.")
        )
    return WorkerPlan(high, use_gpu, cpus_each, low if settings.is_elastic else None)


def check_dashboard(settings: ScalingSettings) -> None:
    """Refuse a dashboard of a local Ray that lacks its packages, before anything is started.

    Raises:
        ConfigError: names what to install.
    """
    if not settings.dashboard or cluster_address(settings) is not None:
        return
    missing = [name for name in DASHBOARD_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"scaling.dashboard: Ray's dashboard is not installed ({', '.join(missing)} not found): "
            "pip install 'raytrain-bert[dashboard]'."
        )


def check_address(address: str) -> None:
    """Refuse a cluster that does not answer: Ray itself would wait for it without a word.

    Raises:
        ResourceError: says how to find or start one.
    """
    if address == "auto":  # Ray finds it by itself, or says at once that there is none
        return
    if "://" in address:
        raise ResourceError(
            f"scaling.address {address}: give HOST:PORT of the head node, from a machine of the cluster. From "
            "elsewhere send the command as a job: raytrain-bert submit."
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ResourceError(f"scaling.address {address!r}: HOST:PORT of the head node, or auto, is expected.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), SECONDS_FOR_AN_ANSWER).close()
        reason = ask_head(address)
    except OSError as error:
        reason = str(error)
    if reason is not None:
        raise ResourceError(
            f"No Ray cluster answers at {address} ({reason}). Start one with `ray start --head`, or leave out "
            "--scaling.address (and RAY_ADDRESS) for a local Ray."
        )


def ask_head(address: str) -> str | None:
    """Why a Ray head node does not answer at an address where somebody listens; None where it does."""
    from ray import _raylet

    reasons: list[str | None] = []

    def ask() -> None:
        try:
            cast(Any, _raylet).GcsClient(address=address).check_alive([], timeout=SECONDS_FOR_AN_ANSWER)
            reasons.append(None)
        except Exception as error:  # Ray's own kinds for no answer and for a wrong token
            reasons.append(next(iter(str(error).strip().splitlines()), type(error).__name__))

    # The client itself tries for most of a minute.
    thread = threading.Thread(target=ask, name="ask-head", daemon=True)
    thread.start()
    thread.join(SECONDS_FOR_AN_ANSWER)
    return reasons[0] if reasons else f"somebody listens there and has not answered within {SECONDS_FOR_AN_ANSWER} s"


def job_env_vars() -> dict[str, str]:
    """Environment variables that the Ray job which this process is the driver of sets; empty where it is none."""
    found: dict[str, str] = json.loads(os.environ.get(JOB_CONFIG, "{}")).get("runtime_env", {}).get("env_vars", {})
    return found


def start_ray(settings: ScalingSettings, node: Node, name: str) -> str | None:
    """Join the cluster, or start a local Ray on this machine; gives the dashboard's URL where one runs.

    Args:
        settings: address, dashboard.
        node: this machine, all of which a local Ray uses.
        name: what the dashboard's list of jobs calls this one.

    Raises:
        ResourceError: the cluster cannot be reached.
    """
    set_environment()
    import ray
    from ray.job_config import JobConfig

    if ray.is_initialized():
        return None
    address = cluster_address(settings)
    if address is not None:
        check_address(address)
    env_vars = {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    }
    if settings.dashboard or address is not None:
        # The dashboard's list of training runs, in this process and in those of trials.
        os.environ.setdefault(TRACK_RUNS, "1")
        env_vars[TRACK_RUNS] = os.environ[TRACK_RUNS]
    # What the runtime environment of a job sets may not be set again.
    env_vars = {name: value for name, value in env_vars.items() if name not in job_env_vars()}
    options: dict[str, Any] = {"runtime_env": {"env_vars": env_vars}, "log_to_driver": True}
    options["job_config"] = JobConfig(metadata={"job_name": name})
    if address is None:
        options |= {
            "address": "local",
            "num_cpus": int(node.cpus),
            "num_gpus": int(node.gpus),
            "include_dashboard": settings.dashboard,
            "dashboard_host": "127.0.0.1",
        }
    else:
        options["address"] = address
    try:
        url: str | None = ray.init(**options).dashboard_url
    except ConnectionError as error:
        raise ResourceError(
            f"No Ray cluster answers at {address} ({error}). Start one with `ray start --head`, or leave out "
            "--scaling.address (and RAY_ADDRESS) for a local Ray."
        ) from None
    return f"http://{url}" if url else None


def set_environment() -> None:
    """What Ray reads from the environment when it is imported."""
    # Ray warns once per process about a change of this default; the new behaviour is what we want.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
    # Held-back repetitions would be printed when the process ends, behind the closing table.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")


@contextmanager
def own_ray() -> Iterator[None]:
    """Leave Ray at the end if it was started (or joined) inside: its last messages must still find the log."""
    before = _is_connected()
    try:
        yield
    finally:
        if not before and _is_connected():
            import ray

            ray.shutdown()


def _is_connected() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def bf16_is_fast(device_type: str) -> bool:
    """Whether the hardware computes in bfloat16 itself; emulated, it is ten times slower than float32."""
    import torch

    if device_type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


def choose_precision(wanted: str, device_type: str) -> str:
    """fp32, bf16 or fp16 for this device.

    Raises:
        ConfigError: float16 without a GPU.
    """
    if wanted == "auto":
        return "bf16" if bf16_is_fast(device_type) else "fp32"
    if wanted == "fp16" and device_type != "cuda":
        raise ConfigError("train.precision fp16 needs a GPU; use bf16 or fp32 on CPU.")
    return wanted


def _room(nodes: Sequence[Node], cpus: int, gpus: int) -> int:
    """How many workers fit, each whole on one node."""
    return sum(min(int(node.cpus // cpus), int(node.gpus // gpus) if gpus else sys.maxsize) for node in nodes)


def _asked_for(workers: int, each: str) -> str:
    return f"{_count(workers, 'worker')}{each} {'was' if workers == 1 else 'were'} asked for"


def _what_is_there(nodes: Sequence[Node]) -> str:
    cpus, gpus = int(sum(node.cpus for node in nodes)), int(sum(node.gpus for node in nodes))
    where = "this machine" if len(nodes) == 1 else f"the cluster of {len(nodes)} nodes"
    return f"{where} has {_count(gpus, 'GPU')} and {_count(cpus, 'CPU')}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
