"""Resumable checkpoints: torch.distributed.checkpoint in safetensors files, progress in JSON.

A checkpoint is a folder `step-00000120` with one shard per rank and `progress.json`, which is written last.
It is made under a temporary name and renamed, so a folder with the final name is complete. Only tensors and JSON
are stored: nothing in a checkpoint can run code.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from raytrain_bert.config.errors import RunFolderError

PROGRESS_FILE = "progress.json"


@dataclass
class Progress:
    """Where a run stands. (epoch, step_in_epoch) is the position in the plan of batches."""

    epoch: int = 0
    """Epochs done."""
    step_in_epoch: int = 0
    """Optimizer steps done in the epoch under way."""
    step: int = 0
    """Optimizer steps done in all."""
    best_score: float | None = None
    best_epoch: float | None = None
    """Epochs done at the best validation; a fraction within an epoch."""
    best_step: int | None = None
    """Step of the best checkpoint."""
    reference_score: float | None = None
    """Score that early stopping compares with: the last one that was better by the asked margin."""
    stale_validations: int = 0
    """Validations since then."""
    validated_step: int | None = None
    """Step of the last validation."""
    stopped_early: bool = False


class CheckpointStore:
    """The folder of checkpoints of one run; every rank calls save, rank 0 does the housekeeping."""

    def __init__(self, folder: Path, num_to_keep: int = 0) -> None:
        self.folder, self.num_to_keep = folder, num_to_keep

    def path(self, step: int) -> Path:
        """Folder of the checkpoint after `step` optimizer steps."""
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, oldest first."""
        return sorted(
            int(path.name.removeprefix("step-"))
            for path in self.folder.glob("step-*")
            if (path / PROGRESS_FILE).is_file()
        )

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return max(self.steps(), default=None)

    def save(self, tensors: dict[str, Tensor], progress: Progress, scores: dict[str, Any] | None = None) -> Path:
        """Save tensors and progress as the checkpoint of `progress.step`; all ranks call it together."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        final = self.path(progress.step)
        temporary = final.with_name(f".{final.name}.tmp")
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        _barrier()
        writer = HuggingFaceStorageWriter(str(temporary), save_distributed=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "torch.distributed is uninitialized": one process
            state_dict_saver.save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())
        if rank == 0:
            content = {"progress": asdict(progress), "scores": scores}
            (temporary / PROGRESS_FILE).write_text(json.dumps(content, indent=1), encoding="utf-8")
            if final.exists():
                shutil.rmtree(final)
            os.replace(temporary, final)
            self.remove_old(progress)
        _barrier()
        return final

    def load(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Read the checkpoint of `step` into `tensors`, in place; any number of ranks."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            state_dict_loader.load(
                tensors,
                storage_reader=HuggingFaceStorageReader(str(self.path(step))),
                no_dist=not dist.is_initialized(),
            )

    def read_progress(self, step: int) -> Progress:
        """Progress as it was saved with the checkpoint of `step`."""
        path = self.path(step) / PROGRESS_FILE
        try:
            return Progress(**json.loads(path.read_text(encoding="utf-8"))["progress"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunFolderError(f"{path}: not a readable checkpoint ({error}).") from None

    def remove_old(self, progress: Progress) -> None:
        """Remove all but the best, the last and the newest `num_to_keep` others."""
        kept = {progress.step, progress.best_step}
        others = [step for step in self.steps() if step not in kept]
        for step in others[: max(0, len(others) - self.num_to_keep)]:
            shutil.rmtree(self.path(step), ignore_errors=True)


def training_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, scaler: torch.amp.GradScaler | None
) -> dict[str, Tensor]:
    """Everything that has to be saved of a training state, as tensors by name that share its memory.

    Learning rates and random numbers are functions of the step, so they need not be stored.
    """
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    if optimizer is not None:
        names = {parameter: name for name, parameter in model.named_parameters()}
        _materialise_state(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for key, value in optimizer.state[parameter].items():
                    tensors[f"optimizer.{names[parameter]}.{key}"] = value
    if scaler is not None and scaler.is_enabled():
        scaler.scale(torch.zeros((), device=next(model.parameters()).device))  # makes its lazy tensors
        tensors["scaler.scale"] = scaler._scale
        tensors["scaler.growth_tracker"] = scaler._growth_tracker
    return tensors


def _materialise_state(optimizer: torch.optim.Optimizer) -> None:
    """Give AdamW its zero state before the first step, so that a checkpoint can be read into it."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                on_device = group.get("fused") or group.get("capturable")
                optimizer.state[parameter].update(
                    step=torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu"),
                    exp_avg=torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    exp_avg_sq=torch.zeros_like(parameter, memory_format=torch.preserve_format),
                )


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
