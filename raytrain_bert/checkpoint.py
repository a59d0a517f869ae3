"""Resumable checkpoints: torch.distributed.checkpoint in safetensors files, progress in JSON.

A checkpoint is a folder `step-00000120` with one shard per rank and `progress.json`, which is written last and holds
size and checksum of every file. It is made under a temporary name, flushed to disk and renamed, so a folder with the
final name is complete, and damage that comes later is found. Only tensors and JSON are stored: nothing in a checkpoint
can run code.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from raytrain_bert.config.errors import RunFolderError

PROGRESS_FILE = "progress.json"
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CHUNK_BYTES = 1 << 22


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
    skipped_steps: int = 0
    """Steps left out because loss or gradients were not finite."""
    skipped_in_a_row: int = 0
    rows_per_rank: list[int] | None = None
    """Rows that each rank has served in the epoch under way; None where the number of ranks changed within it."""
    world_size: int = 1
    """Number of workers that saved this."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is complete on disk."""

    step: int
    path: Path
    stall_seconds: float
    """Time that the training steps waited."""
    write_seconds: float
    """Time from the call until it was complete."""


class CheckpointStore:
    """The folder of checkpoints of one run; every rank calls save, rank 0 does the housekeeping.

    In the background a save waits only for a copy of the tensors in memory; a thread writes it, and its exchanges
    between the ranks have a process group of their own.
    """

    def __init__(
        self,
        folder: Path,
        num_to_keep: int = 0,
        *,
        background: bool = False,
        timeout: timedelta | None = None,
        noted: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Every rank makes its own, at the same time: a process group is made for the writing thread.

        `noted` gives the step of the last checkpoint that the driver has written down; it is never rotated away, for
        workers that outlive their driver a little would leave none whose steps are all in metrics.jsonl.
        """
        self.folder, self.num_to_keep, self.background, self.noted = folder, num_to_keep, background, noted
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout) if dist.is_initialized() else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if background else None
        self._under_way: Future[Saved] | None = None

    def path(self, step: int) -> Path:
        """Folder of the checkpoint after `step` optimizer steps."""
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, oldest first."""
        return sorted(
            int(path.name.removeprefix("step-"))
            for path in self.folder.glob("step-*")
            if path.name.removeprefix("step-").isdigit() and (path / PROGRESS_FILE).is_file()
        )

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return max(self.steps(), default=None)

    def newest_intact(self, warn: Callable[[str], None] = lambda text: None) -> int | None:
        """Step of the newest checkpoint whose files are as they were written; damaged ones are put aside."""
        for step in reversed(self.steps()):
            damage = self.damage(step)
            if damage is None:
                return step
            self._put_aside(step)
            warn(f"the checkpoint of step {step:,} is damaged ({damage}); an older one is used")
        return None

    def damage(self, step: int) -> str | None:
        """What is wrong with the files of a checkpoint; None for nothing."""
        path = self.path(step)
        try:
            files = json.loads((path / PROGRESS_FILE).read_text(encoding="utf-8"))["files"]
            for name, (size, checksum) in files.items():
                if not (path / name).is_file():
                    return f"{name} is missing"
                there = (path / name).stat().st_size
                if there != size:
                    return f"{name} has {there:,} of {size:,} bytes"
                if crc32(path / name) != checksum:
                    return f"the content of {name} has changed"
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"{PROGRESS_FILE} is not readable"
        return None

    def save(
        self,
        tensors: dict[str, Tensor],
        progress: Progress,
        scores: dict[str, Any] | None = None,
        *,
        started: float | None = None,
    ) -> None:
        """Save tensors and progress as the checkpoint of `progress.step`; all ranks call it together.

        In the background it returns when the tensors are copied; `finished` tells when it is complete. A save that is
        still under way is waited for. `started` is when the steps began to wait, by time.monotonic().

        Raises:
            RunFolderError: the disk is full, or the folder cannot be written; the checkpoint before is intact.
        """
        start = time.monotonic() if started is None else started
        self.wait()
        progress = replace(progress)  # the loop goes on with its own
        content = {"progress": asdict(progress), "scores": scores}
        if self._thread is None:
            self._under_way = Future()
            try:
                saved = self._write(tensors, content, progress, start, None)
            except BaseException:
                self._under_way = None
                raise
            self._under_way.set_result(saved)
            return
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        stall = time.monotonic() - start
        self._under_way = self._thread.submit(self._write, copies, content, progress, start, stall)

    def finished(self) -> Saved | None:
        """The save that has become complete since the last call; None for none. Never waits."""
        if self._under_way is None or not self._under_way.done() or self._under_way.exception() is not None:
            return None
        saved, self._under_way = self._under_way.result(), None
        return saved

    def has_failed(self) -> bool:
        """Whether the save under way has failed; `wait` then raises."""
        return self._under_way is not None and self._under_way.done() and self._under_way.exception() is not None

    def wait(self) -> None:
        """Wait for the save under way; what `finished` has to tell stays.

        Raises:
            RunFolderError: it failed.
        """
        if self._under_way is not None:
            try:
                self._under_way.result()
            except BaseException:
                self._under_way = None
                raise

    def close(self) -> None:
        """End the writing thread, when it has done its work; an error is not raised any more."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    def load(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Read the checkpoint of `step` into `tensors`, in place; any number of ranks."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            try:
                state_dict_loader.load(
                    tensors,
                    storage_reader=HuggingFaceStorageReader(str(self.path(step))),
                    process_group=self._group,
                    no_dist=not dist.is_initialized(),
                )
            except CheckpointException as error:  # no Exception: nothing else would catch it
                raise RuntimeError(f"{self.path(step)} cannot be loaded: {error}") from error

    def read_progress(self, step: int) -> Progress:
        """Progress as it was saved with the checkpoint of `step`."""
        path = self.path(step) / PROGRESS_FILE
        try:
            content = json.loads(path.read_text(encoding="utf-8"))["progress"]
            known = {field.name for field in fields(Progress)}
            return Progress(**{name: value for name, value in content.items() if name in known})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunFolderError(f"{path}: not a readable checkpoint ({error}).") from None

    def remove_old(self, progress: Progress) -> None:
        """Remove all but the best, the last, what the driver goes by, and the newest `num_to_keep` others."""
        kept = {progress.step, progress.best_step}
        others = [step for step in self.steps() if step not in kept]
        noted = self._noted_and_its_best()
        for step in others[: max(0, len(others) - self.num_to_keep)]:
            if step not in noted:
                self._remove(step)

    def tidy(self) -> None:
        """Remove what is too much now that the driver has noted everything; for the driver, after the workers' end."""
        newest = self.latest()
        if newest is not None:
            self.remove_old(self.read_progress(newest))

    def _noted_and_its_best(self) -> set[int | None]:
        noted = self.noted()
        if noted not in self.steps():
            return set()
        try:
            return {noted, self.read_progress(noted).best_step}
        except RunFolderError:  # damaged: nothing to go on from
            return set()

    def remove_unrecorded(self, step: int) -> list[int]:
        """Remove checkpoints after `step`: their steps were never noted, and are trained again. Gives their steps."""
        newer = [found for found in self.steps() if found > step]
        for found in newer:
            self._remove(found)
        return newer

    def remove_leftovers(self) -> None:
        """Remove what an interrupted save left behind."""
        for path in self.folder.glob(".*.tmp"):
            shutil.rmtree(path, ignore_errors=True)

    def _write(
        self, tensors: dict[str, Tensor], content: dict[str, Any], progress: Progress, start: float, stall: float | None
    ) -> Saved:
        """Write everything under a temporary name and rename it; all ranks, in the writing thread or not."""
        final = self.path(progress.step)
        temporary = final.with_name(f".{final.name}.tmp")

        def begin() -> None:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)

        def end() -> None:
            self._complete(temporary, progress.step, content)
            self.remove_old(progress)

        try:
            self._on_rank_0(begin)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # "torch.distributed is uninitialized": one process
                state_dict_saver.save(
                    tensors,
                    storage_writer=HuggingFaceStorageWriter(str(temporary), save_distributed=True),
                    process_group=self._group,
                    no_dist=not dist.is_initialized(),
                )
            self._on_rank_0(end)
        except (Exception, CheckpointException) as error:
            if self._rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise self._explained(error, progress.step) from error
        seconds = time.monotonic() - start
        return Saved(progress.step, final, seconds if stall is None else stall, seconds)

    def _on_rank_0(self, action: Callable[[], None]) -> None:
        """Do something on rank 0; its error is raised on every rank, so that none waits for the others."""
        box: list[Any] = [None]
        if self._rank == 0:
            try:
                action()
            except OSError as error:
                box = [OSError(error.errno, error.strerror, error.filename)]
        if self._group is not None:
            dist.broadcast_object_list(box, src=0, group=self._group)
        if box[0] is not None:
            raise box[0]

    def _complete(self, temporary: Path, step: int, content: dict[str, Any]) -> None:
        """Flush the files, note their sums, write the marker, rename: from then on the checkpoint is there."""
        files = {}
        for path in sorted(temporary.iterdir()):
            flush_to_disk(path)
            files[path.name] = [path.stat().st_size, crc32(path)]
        marker = temporary / PROGRESS_FILE
        marker.write_text(json.dumps(content | {"files": files}, indent=1), encoding="utf-8")
        flush_to_disk(marker)
        self._remove(step)
        os.replace(temporary, self.path(step))
        flush_to_disk(self.folder)

    def _explained(self, error: BaseException, step: int) -> Exception:
        """An error of the storage as one that the user can act on; any other as an ordinary exception."""
        cause = storage_error(error)
        if cause is None:
            return error if isinstance(error, Exception) else RuntimeError(str(error))
        older = [found for found in self.steps() if found != step]
        intact = f" The checkpoint of step {older[-1]:,} is intact." if older else ""
        why = "the disk is full" if cause.errno in FULL_DISK else str(cause.strerror or cause)
        return RunFolderError(
            f"The checkpoint of step {step:,} could not be written to {self.folder}: {why}.{intact} "
            "Make room (or set --checkpoint.num-to-keep 0) and go on with --resume."
        )

    def _put_aside(self, step: int) -> None:
        """Rename a damaged checkpoint, so that it counts no more but can be looked at."""
        path = self.path(step)
        aside = path.with_name(f"damaged-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(path, aside)

    def _remove(self, step: int) -> None:
        """Remove a checkpoint; the first thing to go is its name, so that a half-removed one never counts."""
        path = self.path(step)
        doomed = path.with_name(f".{path.name}.removed.tmp")
        shutil.rmtree(doomed, ignore_errors=True)
        try:
            os.replace(path, doomed)
        except FileNotFoundError:
            return
        shutil.rmtree(doomed, ignore_errors=True)


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


def storage_error(error: BaseException) -> OSError | None:
    """The operating system's error inside what the checkpoint writer raised, where there is one."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError):
            return seen
        # CheckpointException: the failures of all ranks, each with its traceback.
        for failure in getattr(seen, "failures", {}).values():
            inner = failure[0] if isinstance(failure, tuple) else failure
            if isinstance(inner, BaseException) and (found := storage_error(inner)):
                return found
        # safetensors has an error of its own, which keeps the system's only as text.
        if "os error 28" in str(seen) or "No space left" in str(seen):
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        seen = seen.__cause__ or seen.__context__
    return None


def crc32(path: Path) -> int:
    """Checksum of a file, read in pieces."""
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            checksum = zlib.crc32(piece, checksum)
    return checksum


def flush_to_disk(path: Path) -> None:
    """Wait until a file or folder has left the page cache: a machine that loses power has it all."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
