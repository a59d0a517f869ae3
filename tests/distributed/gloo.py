"""Run a function in real processes that talk over gloo."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_gloo(fn: Callable[..., Any], world_size: int, tmp_path: Path, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call `fn(rank, world_size, *args)` in `world_size` processes of one group; gives the results by rank.

    `fn` is a function at the top of a module, arguments and results are picklable. The first error of a rank is raised
    here; after `timeout` seconds the processes are killed and TimeoutError is raised.
    """
    folder = Path(tempfile.mkdtemp(dir=tmp_path))  # a test may call more than once
    # Each process is forked from one that has imported everything and done nothing: the imports cost seconds.
    multiprocessing.set_forkserver_preload(["tests.distributed.training"])
    context = mp.start_processes(
        _rank_main, (fn, world_size, folder, args), nprocs=world_size, join=False, start_method="forkserver"
    )
    deadline = time.monotonic() + timeout
    try:
        while not context.join(timeout=max(0.0, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{fn.__name__} on {world_size} ranks did not end within {timeout:g} s")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
    return [pickle.loads((folder / f"{rank}.pkl").read_bytes()) for rank in range(world_size)]


def _rank_main(rank: int, fn: Callable[..., Any], world_size: int, folder: Path, args: tuple[Any, ...]) -> None:
    """Join the group, call, leave the result in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=(folder / "rendezvous").as_uri(), rank=rank, world_size=world_size)
    try:
        result = fn(rank, world_size, *args)
        (folder / f"{rank}.pkl").write_bytes(pickle.dumps(result))
    finally:
        dist.destroy_process_group()
