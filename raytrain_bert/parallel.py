"""One model on every worker: DistributedDataParallel and the few collectives that the loop needs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")


def is_distributed() -> bool:
    """Whether this process is one of a process group (even of one)."""
    return dist.is_available() and dist.is_initialized()


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank and the number of processes; (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)


def parallelize(model: nn.Module, device: torch.device, *, compile_model: bool = False) -> nn.Module:
    """Put the model on the device and wrap it for data parallel training; the optimizer comes after this.

    One device per process, never nn.DataParallel. Every parameter that requires a gradient gets one in every
    backward pass (the model is built so), so DDP need not search for unused ones.
    """
    model.to(device)
    if compile_model:
        model = cast(nn.Module, torch.compile(model, dynamic=True))
    if not is_distributed():
        return model
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
        find_unused_parameters=False,
    )


def gradient_sync(model: nn.Module, enabled: bool) -> AbstractContextManager[None]:
    """Synchronise gradients in the backward pass only where enabled: on the last micro batch of a step."""
    if isinstance(model, DistributedDataParallel) and not enabled:
        return model.no_sync()
    return nullcontext()


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Sum a tensor over all ranks, in place."""
    if is_distributed():
        dist.all_reduce(tensor)
    return tensor


def broadcast(value: T) -> T:
    """Rank 0's value on every rank: a decision is made once."""
    if not is_distributed():
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]  # type: ignore[no-any-return]
