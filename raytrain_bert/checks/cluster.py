"""The nodes of the cluster: room, versions, clocks, shared storage, data, and the way between the workers."""

from __future__ import annotations

import importlib.metadata
import platform
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rich.filesize import decimal as size

from raytrain_bert import runtime
from raytrain_bert.checks.check import Check, counted
from raytrain_bert.config.errors import UserError
from raytrain_bert.config.schema import Config

PACKAGES = ("torch", "ray", "transformers")
LARGEST_SKEW = 1.0
"""Seconds between two clocks above which times in logs and metrics mislead."""
SECONDS_PER_NODE = 60
SMALL, LARGE = 4, 64 * 2**20
"""Bytes that are reduced over the workers, for latency and for bandwidth."""
ROUNDS = 10


@dataclass(frozen=True)
class NodeReport:
    """What a node says of itself."""

    host: str
    time: float
    versions: dict[str, str]
    missing: tuple[str, ...]
    """Paths that it does not see."""
    problem: str
    """Why the storage path does not work there; empty where it does."""


def check_cluster(config: Config) -> Iterator[Check]:
    """Everything about the nodes; Ray is up."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    cpus, gpus = (sum(node["Resources"].get(kind, 0) for node in nodes) for kind in ("CPU", "GPU"))
    store = sum(node["Resources"].get("object_store_memory", 0) for node in nodes)
    told = ", ".join([counted(len(nodes), "node"), counted(cpus, "CPU"), counted(gpus, "GPU")])
    told += f", object store {size(int(store))}"
    yield Check("cluster", "ok", told, figures={"nodes": len(nodes), "cpus": cpus, "gpus": gpus, "object_store": store})
    try:
        workers = runtime.plan_workers(config.scaling, runtime.cluster_nodes())
    except UserError as error:
        yield Check("workers", "fault", str(error), figures={})
        return
    yield arithmetic(workers, cpus)
    with_storage = Path(config.output.storage_path).expanduser().absolute()
    paths = [path for path in local_paths(config) if Path(path).exists()]
    mark = storage_mark(with_storage)
    try:
        reports = ask_nodes(nodes, str(mark) if mark else str(with_storage), paths)
        yield from judge(reports, str(with_storage), mark)
    finally:
        if mark is not None:
            for path in mark.parent.glob(f"{mark.name}*"):
                path.unlink(missing_ok=True)
    if workers.num_workers > 1:
        yield between_workers(workers)


def arithmetic(workers: runtime.WorkerPlan, cpus: float) -> Check:
    """Workers and what is left for reading and tokenising, which is done before they start."""
    used = workers.num_workers * workers.cpus_per_worker
    each = counted(workers.cpus_per_worker, "CPU") + (" and a GPU" if workers.use_gpu else "")
    told = (
        f"{counted(workers.num_workers, 'worker')} with {each} each; {counted(cpus - used, 'CPU')} left for data tasks"
    )
    figures = {"workers": workers.num_workers, "cpus_each": workers.cpus_per_worker, "cpus_left": cpus - used}
    return Check("workers", "ok", told, figures=figures)


def local_paths(config: Config) -> list[str]:
    """Paths of the data and the model that must be seen by the nodes."""
    named = [*config.data.train, *(config.data.validation or ()), *(config.data.test or ()), config.model.name]
    return [path for path in named if Path(path).is_absolute() and not set(path) & set("*?[")]


def storage_mark(folder: Path) -> Path | None:
    """A file under the storage path that other nodes must see; None where this node cannot write it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / f".doctor-{uuid.uuid4().hex}"
        mark.write_text(mark.name, encoding="utf-8")
    except OSError:
        return None
    return mark


def ask_nodes(nodes: Sequence[dict[str, Any]], mark: str, paths: Sequence[str]) -> list[NodeReport | str]:
    """A report of each node, or the host of one that gave none."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def on(node: dict[str, Any]) -> Any:
        strategy = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
        return ray.remote(report_of_node).options(num_cpus=0, scheduling_strategy=strategy).remote(mark, tuple(paths))

    found: list[NodeReport | str] = []
    for node in nodes:
        ray.get(on(node), timeout=SECONDS_PER_NODE)  # the process is there: what follows is quick
        before = time.time()
        try:
            report: NodeReport = ray.get(on(node), timeout=SECONDS_PER_NODE)
        except Exception:  # a node that is there and runs nothing
            found.append(str(node["NodeManagerHostname"]))
            continue
        middle = (before + time.time()) / 2
        found.append(NodeReport(report.host, report.time - middle, report.versions, report.missing, report.problem))
    return found


def report_of_node(mark: str, paths: tuple[str, ...]) -> NodeReport:
    """Run on a node."""
    import socket

    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "missing"
    problem = ""
    try:
        path = Path(mark)
        if path.read_text(encoding="utf-8") != path.name:
            problem = "another file is there"
        path.with_name(f"{path.name}-{uuid.uuid4().hex}").write_text(path.name, encoding="utf-8")
    except OSError as error:
        problem = error.strerror or str(error)
    missing = tuple(path for path in paths if not Path(path).exists())
    return NodeReport(socket.gethostname(), time.time(), versions, missing, problem)


def judge(reports: Sequence[NodeReport | str], storage: str, mark: Path | None) -> Iterator[Check]:
    """What the reports of the nodes come to."""
    there = [report for report in reports if isinstance(report, NodeReport)]
    silent = [report for report in reports if isinstance(report, str)]
    if silent:
        yield Check("nodes", "fault", f"{', '.join(silent)} ran nothing", "Look at `ray status` and at that machine.")
    if not there:
        return
    skew = max(report.time for report in there) - min(report.time for report in there)
    if skew > LARGEST_SKEW:
        yield Check("clocks", "warning", f"{skew:.1f} s apart", "Set the clocks by NTP (chrony).", {"seconds": skew})
    else:
        yield Check("clocks", "ok", f"at most {skew:.2f} s apart", figures={"seconds": round(skew, 3)})
    first = there[0]
    others = [f"{report.host} has {name} {version}" for report in there for name, version in report.versions.items()
              if version != first.versions[name]]  # fmt: skip
    if others:
        told = f"{first.host} has {', '.join(f'{n} {v}' for n, v in first.versions.items())}; {', '.join(others)}"
        yield Check("versions", "fault", told, "Install the same versions on all nodes: constraints.txt.")
    else:
        yield Check("versions", "ok", "the same on all nodes", figures=first.versions)
    problems = [f"{report.host}: {report.problem}" for report in there if report.problem]
    if mark is None:
        yield Check("storage", "fault", f"{storage} cannot be written here", "Choose another --output.storage-path.")
    elif problems:
        remedy = "All nodes need one folder for the runs: set --output.storage-path to a mount that they share (NFS)."
        yield Check("storage", "fault", f"{storage} is not shared: {'; '.join(problems)}", remedy)
    else:
        yield Check("storage", "ok", f"{storage} is written and read by all nodes")
    missing = [f"{report.host} does not see {path}" for report in there for path in report.missing]
    if missing:
        remedy = "Put data and model on storage that all nodes share, or on every node under the same path."
        yield Check("data", "fault", "; ".join(missing), remedy)


def between_workers(workers: runtime.WorkerPlan) -> Check:
    """Latency and bandwidth of an all-reduce over the workers, as training does it."""
    import tempfile

    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    resources = {"CPU": float(workers.cpus_per_worker)} | ({"GPU": 1.0} if workers.use_gpu else {})
    with tempfile.TemporaryDirectory() as scratch:
        trainer = TorchTrainer(
            cast(Any, time_all_reduce),
            torch_config=TorchConfig(backend=workers.backend, timeout_s=SECONDS_PER_NODE),
            scaling_config=ray.train.ScalingConfig(
                num_workers=workers.num_workers, use_gpu=workers.use_gpu, resources_per_worker=resources
            ),
            run_config=ray.train.RunConfig(name="doctor", storage_path=scratch),
        )
        try:
            figures: dict[str, float] = cast(Any, trainer.fit()).return_value
        except Exception as error:
            told = (
                f"{workers.num_workers} workers cannot talk to each other: {str(error).strip().splitlines()[-1][:200]}"
            )
            remedy = (
                "Nodes need all ports between them; where a machine has several networks, set GLOO_SOCKET_IFNAME or "
                "NCCL_SOCKET_IFNAME to the right one."
            )
            return Check("all-reduce", "fault", told, remedy)
    told = (
        f"{figures['latency_seconds'] * 1e3:.2f} ms for a number, {size(int(figures['bytes_per_second']))}/s for "
        f"{size(LARGE)}, {workers.num_workers} workers by {workers.backend}"
    )
    return Check("all-reduce", "ok", told, figures=figures)


def time_all_reduce() -> dict[str, float]:
    """Run by every worker; the medians of rank 0."""
    import statistics

    import torch
    import torch.distributed as dist
    from ray.train.torch import get_device

    device = get_device()
    seconds = {}
    for count in (SMALL, LARGE):
        tensor = torch.zeros(count // 4, device=device)
        times = []
        for _ in range(ROUNDS + 2):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(tensor)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        seconds[count] = statistics.median(times[2:])
    return {"latency_seconds": seconds[SMALL], "bytes_per_second": LARGE / seconds[LARGE]}
