"""One optimizer step of one rank."""

from __future__ import annotations

import math
import socket
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from raytrain_bert import parallel
from raytrain_bert.batching import plan
from raytrain_bert.batching.collate import MicroBatch, collate
from raytrain_bert.config.errors import ResourceError
from raytrain_bert.parts import Parts
from raytrain_bert.pulse import COMPUTING, EXCHANGING


class Stopwatch:
    """Time that a rank computes; on a GPU by its own clock, which is read later so that nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        """Start."""
        self._events: list[torch.cuda.Event] = []
        self._on_gpu = device.type == "cuda"
        self._started = time.perf_counter()
        self._seconds = 0.0
        self._mark()

    def stop(self) -> None:
        """Stop."""
        self._seconds = time.perf_counter() - self._started
        self._mark()

    def seconds(self) -> float:
        """Between start and stop; a GPU must have come past the stop."""
        if self._on_gpu:
            first, last = self._events
            return float(first.elapsed_time(last)) / 1000
        return self._seconds

    def _mark(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)


@dataclass(frozen=True)
class Share:
    """What one rank has of a global batch."""

    rows: NDArray[np.int64]
    """Positions among the training rows."""
    micro_batches: list[MicroBatch]
    counted: bool
    """False where the rank has none: it goes through the motions with a row of weight 0."""


@dataclass(frozen=True)
class StepResult:
    """Of one step, on one rank."""

    loss_sum: Tensor
    """Weighted sum of this rank's losses, () float64."""
    weight: float
    """Sum of the weights of this rank's rows."""
    grad_norm: Tensor
    """L2 norm of the whole gradient before clipping, (); the same on every rank."""
    skipped: bool
    """Left out, because the gradient was not finite."""
    busy: Stopwatch
    """Ran while this rank computed, up to the last backward, in which it waits for the others."""


def share_of(parts: Parts, batch: NDArray[np.int64], lengths: NDArray[np.integer]) -> Share:
    """This rank's rows of a global batch, as micro batches."""
    share = plan.deal(batch, lengths, parts.world_size)[parts.rank]
    # A rank without a row in a short batch still takes part in the gradient exchange, with weight 0.
    counted = len(share) > 0
    rows = share if counted else batch[:1]
    train_rows = parts.splits["train"]
    micro_batches = [
        collate(parts.rows, train_rows[part], pad_token_id=parts.pad_token_id, token_type_ids=parts.token_type_ids)
        for part in plan.micro_batches(rows, lengths, parts.tokens_per_micro_batch)
    ]
    return Share(share, micro_batches, counted)


def weight_of(parts: Parts, rows: NDArray[np.int64]) -> float:
    """Sum of the loss weights of training rows: their number, where all classes weigh the same."""
    if parts.job.class_weights is None:
        return float(len(rows))
    labels = parts.rows.label_ids[parts.splits["train"][rows]]
    return float(np.asarray(parts.job.class_weights, dtype=np.float64)[labels].sum())


def train_step(parts: Parts, share: Share, global_weight: float, step: int) -> StepResult:
    """One optimizer step over this rank's share of a global batch.

    The loss is the weighted mean over the rows of the whole global batch, whatever the number of workers and micro
    batches: each rank sums over its rows, and DDP's mean over ranks is undone by the factor world_size.
    """
    seed_dropout(parts.config.train.seed, step, parts.rank)
    scale = parts.world_size / global_weight if share.counted else 0.0
    total = torch.zeros((), device=parts.device, dtype=torch.float64)
    parts.pulse.set(step + 1, COMPUTING)
    busy = Stopwatch(parts.device)
    for index, micro_batch in enumerate(share.micro_batches):
        batch = micro_batch.to(parts.device)
        is_last = index == len(share.micro_batches) - 1
        try:
            with parallel.gradient_sync(parts.model, enabled=is_last):
                with parts.autocast():
                    logits = parts.model(**batch.inputs()).logits
                loss_sum = F.cross_entropy(logits.float(), batch.labels, weight=parts.class_weights, reduction="sum")
                if is_last:
                    busy.stop()
                    parts.pulse.set(step + 1, EXCHANGING)
                parts.scaler.scale(loss_sum * scale).backward()
        except torch.OutOfMemoryError as error:
            raise out_of_memory(parts, batch) from error
        if share.counted:
            total += loss_sum.detach()
    parts.scaler.unscale_(parts.optimizer)
    parameters = [p for group in parts.optimizer.param_groups for p in group["params"]]
    limit = parts.config.optim.max_grad_norm
    grad_norm = nn.utils.clip_grad_norm_(parameters, math.inf if limit is None else limit)
    # The exchanged gradients are the same bits on every rank, and so is this decision. (fp16's scaler has its own.)
    skipped = parts.config.train.non_finite == "skip" and not math.isfinite(grad_norm.item())
    if not skipped or parts.scaler.is_enabled():
        parts.scaler.step(parts.optimizer)
        parts.scaler.update()
    parts.schedule.step()
    parts.optimizer.zero_grad(set_to_none=True)
    return StepResult(total, weight_of(parts, share.rows), grad_norm, skipped, busy)


def out_of_memory(parts: Parts, batch: MicroBatch) -> ResourceError:
    """The error that says which batch did not fit, and what to change."""
    rows, length = batch.input_ids.shape
    return ResourceError(
        f"{parts.device} of {socket.gethostname()} (worker {parts.rank}) is out of memory with a micro batch of "
        f"{rows:,} rows x {length:,} tokens = {rows * length:,} (up to {parts.tokens_per_micro_batch:,} are allowed). "
        "Lower --train.tokens-per-micro-batch (the result stays the same) or --data.max-length, or set "
        "--model.gradient-checkpointing."
    )


def seed_dropout(seed: int, step: int, rank: int) -> None:
    """Make this step's random numbers a function of (seed, step, rank): a resumed run needs no stored state."""
    torch.manual_seed(int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0] >> 1))
