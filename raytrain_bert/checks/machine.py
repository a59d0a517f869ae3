"""This machine: packages, GPUs, processors, memory, disk, token, ports. Nothing is started."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from rich.filesize import decimal as size

from raytrain_bert import __version__, runtime
from raytrain_bert.checks.check import Check, counted

DISTRIBUTION = "raytrain-bert"
SHOWN = ("torch", "ray", "transformers")
OBJECT_STORE_SHARE = 0.3
"""Of the memory, for Ray's object store, where nothing else is set (Ray's default)."""
LITTLE_DISK, NO_DISK = 10 * 10**9, 10**9
"""Free bytes under the storage path below which a warning is due, and a fault."""
PORTS = {6379: "a Ray head node", 8265: "Ray's dashboard"}
LINKS = {"NV": "NVLink", "PIX": "PCIe, one switch", "PXB": "PCIe, several switches", "PHB": "PCIe, the CPU's bridge",
         "NODE": "PCIe, across host bridges", "SYS": "PCIe, between two CPU sockets"}  # fmt: skip
"""How `nvidia-smi topo -m` names the way between two GPUs, nearest first."""


def check_machine(storage_path: str) -> Iterator[Check]:
    """Everything that can be known of this machine alone."""
    yield packages()
    yield gpus()
    yield processors()
    yield memory()
    yield disk(storage_path)
    yield token()
    yield ports()


def packages() -> Check:
    """Python and the packages that this project names, against the versions that it works with."""
    from packaging.requirements import Requirement

    wrong = []
    for text in importlib.metadata.requires(DISTRIBUTION) or ():
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{wanted.name} is missing")
            continue
        if not wanted.specifier.contains(version, prereleases=True):
            wrong.append(f"{wanted.name} {version} is not {wanted.specifier}")
    versions = {name: importlib.metadata.version(name) for name in SHOWN}
    told = ", ".join([f"raytrain-bert {__version__}", f"Python {platform.python_version()}",
                      *(f"{name} {version}" for name, version in versions.items())])  # fmt: skip
    figures = {"python": platform.python_version(), **versions}
    if wrong:
        remedy = "pip install -c constraints.txt -e . (in the project's folder)"
        return Check("packages", "fault", f"{told}; {', '.join(wrong)}", remedy, figures)
    return Check("packages", "ok", told, figures=figures)


def gpus() -> Check:
    """GPUs as PyTorch sees them, against those that the driver has."""
    import torch

    listed = nvidia_smi("--query-gpu=driver_version,name", "--format=csv,noheader")
    lines = listed.strip().splitlines() if listed else []
    if not torch.cuda.is_available():
        if not lines:
            return Check("GPUs", "ok", "none; training runs on the CPU", figures={"count": 0})
        build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for the CPU alone"
        told = (
            f"the driver has {counted(len(lines), 'GPU')}, and PyTorch sees none (torch {torch.__version__} is {build})"
        )
        remedy = (
            "Install the CUDA build of torch that the driver supports (pytorch.org, Get Started), or a newer driver."
        )
        return Check("GPUs", "fault", told, remedy, {"count": 0, "driver_has": len(lines)})
    properties = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    told = ", ".join(f"{p.name} ({size(p.total_memory)})" for p in properties)
    driver = lines[0].partition(",")[0] if lines else "unknown"
    links = links_between(nvidia_smi("topo", "-m") or "") if len(properties) > 1 else []
    if links:
        told += f"; between them {', '.join(links)}"
    figures = {"count": len(properties), "names": [p.name for p in properties], "driver": driver, "links": links,
               "memory": [p.total_memory for p in properties]}  # fmt: skip
    told += f"; driver {driver}, CUDA {torch.version.cuda}"
    if len({p.name for p in properties}) > 1:
        remedy = "The slowest sets the pace: choose alike ones with CUDA_VISIBLE_DEVICES."
        return Check("GPUs", "warning", told, remedy, figures)
    return Check("GPUs", "ok", told, figures=figures)


def nvidia_smi(*words: str) -> str | None:
    """What NVIDIA's tool prints; None where there is none."""
    try:
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def links_between(topology: str) -> list[str]:
    """The kinds of links between GPUs that `nvidia-smi topo -m` tells, nearest first."""
    found = set()
    for line in topology.splitlines():
        words = line.split()
        if words and re.fullmatch(r"GPU\d+", words[0]):
            found |= {re.sub(r"\d+$", "", word) for word in words[1:] if re.sub(r"\d+$", "", word) in LINKS}
    return [told for kind, told in LINKS.items() if kind in found]


def processors() -> Check:
    """CPUs that this process may use, and whether they compute in bfloat16."""
    import torch

    there, usable = os.cpu_count() or 1, runtime.usable_cpus()
    capabilities = torch.cpu.get_capabilities()
    bf16 = [name for name in ("amx_bf16", "avx512_bf16") if capabilities.get(name)]
    told = f"{counted(usable, 'CPU')}" + (f" of {there}" if usable != there else "")
    told += f", bfloat16 by {' and '.join(bf16)}" if bf16 else ", no bfloat16 (training in float32)"
    figures = {"usable": usable, "there": there, "bf16": bf16}
    if usable < 2:
        remedy = "Ray, the data tasks and the worker share it: expect a slow start; give the container more CPUs."
        return Check("CPUs", "warning", told, remedy, figures)
    return Check("CPUs", "ok", told, figures=figures)


def memory() -> Check:
    """Memory, and shared memory for Ray's object store, which holds the tokens of all rows."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        shared = shutil.disk_usage("/dev/shm").total
    except OSError:
        shared = 0
    store = int(total * OBJECT_STORE_SHARE)
    told = f"{size(total)}; object store {size(store)}, /dev/shm {size(shared)}"
    figures = {"total": total, "object_store": store, "shared_memory": shared}
    if shared < store:
        remedy = f"Ray would put its object store on disk. In a container: --shm-size={-(-store // 10**9)}gb."
        return Check("memory", "warning", told, remedy, figures)
    return Check("memory", "ok", told, figures=figures)


def disk(storage_path: str) -> Check:
    """Room where runs are written."""
    path = Path(storage_path).expanduser().absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    told, figures = f"{size(free)} free under {path}", {"free": free, "path": str(path)}
    remedy = "A checkpoint takes about 12 bytes a parameter: free some, or choose another --output.storage-path."
    if not os.access(existing, os.W_OK):
        return Check("disk", "fault", f"{existing} cannot be written", "Choose another --output.storage-path.", figures)
    if free < LITTLE_DISK:
        return Check("disk", "fault" if free < NO_DISK else "warning", told, remedy, figures)
    return Check("disk", "ok", told, figures=figures)


def token() -> Check:
    """Ray's token, which everybody who joins the cluster needs."""
    path = Path.home() / ".ray" / "auth_token"
    if os.environ.get("RAY_AUTH_MODE") == "disabled":
        remedy = "unset RAY_AUTH_MODE: without it whoever reaches the head node's ports runs programs on it."
        return Check("token", "warning", "Ray's token authentication is switched off (RAY_AUTH_MODE)", remedy)
    if os.environ.get("RAY_AUTH_TOKEN"):
        return Check("token", "ok", "in RAY_AUTH_TOKEN")
    if not path.is_file():
        return Check("token", "ok", "none yet; Ray makes one when it starts here")
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        return Check("token", "warning", f"{path} can be read by others (mode {mode:o})", f"chmod 600 {path}")
    return Check("token", "ok", str(path))


def ports() -> Check:
    """Whether Ray listens on this machine already."""
    there = [f"{what} (port {port})" for port, what in PORTS.items() if listens(port)]
    told = (
        f"{' and '.join(there)} on this machine; join with --scaling.address auto"
        if there
        else "no Ray on this machine"
    )
    return Check("ports", "ok", told, figures={"open": [port for port in PORTS if listens(port)]})


def listens(port: int) -> bool:
    """Whether somebody listens on a port of this machine."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
