"""Figures of each optimizer step, summed over the ranks a few steps at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from raytrain_bert import parallel
from raytrain_bert.batching.collate import MicroBatch
from raytrain_bert.progress.board import BoardClient
from raytrain_bert.step import StepResult, Stopwatch

FIGURES = 5
"""Of each step: loss sum, weight, rows, tokens, tokens with padding."""


class StepLog:
    """Per-step figures, summed over the ranks a few steps at a time and posted by rank 0.

    The exchange also carries wishes (to stop, to save, ...), so that every rank learns of them at the same step.
    """

    def __init__(
        self, board: BoardClient, rank: int, device: torch.device, *, every: int, total_steps: int, world_size: int = 1
    ) -> None:
        self.board, self.rank, self.device, self.world_size = board, rank, device, world_size
        self.every, self.total_steps = every, total_steps
        self.sums: list[Tensor] = []
        self.steps: list[dict[str, Any]] = []
        self.norms: list[Tensor] = []
        self.busy: list[Stopwatch] = []
        self.started = time.monotonic()

    def add(
        self, epoch: int, step: int, result: StepResult, learning_rate: float, micro_batches: list[MicroBatch]
    ) -> None:
        """Note one step of this rank, and what it forwarded."""
        counts = [
            result.weight,
            sum(len(b.rows) for b in micro_batches),
            sum(b.num_tokens for b in micro_batches),
            sum(b.num_padded_tokens for b in micro_batches),
        ]
        self.sums.append(torch.cat([result.loss_sum.reshape(1), result.loss_sum.new_tensor(counts)]))
        self.norms.append(result.grad_norm.detach())
        self.busy.append(result.busy)
        self.steps.append(
            {"epoch": epoch, "step": step, "learning_rate": learning_rate}
            | ({"skipped": True} if result.skipped else {})
        )

    def is_due(self) -> bool:
        """Whether it is time for the exchange; the same answer on every rank."""
        return len(self.steps) >= self.every

    def restart_clock(self) -> None:
        """Leave out the time since the last exchange: a validation or a checkpoint fell into it."""
        assert not self.steps, "flushed before"
        self.started = time.monotonic()

    def flush(self, wishes: Sequence[bool] = ()) -> tuple[list[dict[str, Any]], list[bool]]:
        """Sum over the ranks and post; gives the records of the steps, and which wishes any rank has.

        The same on every rank; each gives as many wishes.
        """
        # One exchange for all: a row for each step, one for the wishes, and one with a column for each rank's time.
        norms = torch.stack(self.norms).tolist() if self.norms else []  # waits for the device: the times can be read
        width = max(FIGURES, self.world_size, len(wishes))
        table = torch.zeros((len(self.sums) + 2, width), dtype=torch.float64, device=self.device)
        if self.sums:
            table[:-2, :FIGURES] = torch.stack(self.sums)
        table[-2, : len(wishes)] = torch.tensor([float(wish) for wish in wishes], dtype=torch.float64)
        table[-1, self.rank] = sum(busy.seconds() for busy in self.busy)
        *sums, wished, times = parallel.sum_over_ranks(table).tolist()
        granted = [figure > 0 for figure in wished[: len(wishes)]]
        if not self.steps:
            return [], granted
        gap = (max(times[: self.world_size]) - min(times[: self.world_size])) / len(self.steps)
        now = time.monotonic()
        records = [
            {
                **step,
                "loss": loss / weight if weight else math.nan,
                "grad_norm": norm,
                "rows": int(rows),
                "tokens": int(tokens),
                "padded_tokens": int(padded),
                "seconds": (now - self.started) / len(self.steps),
                "straggler_gap": gap,
            }
            for step, norm, (loss, weight, rows, tokens, padded, *_) in zip(self.steps, norms, sums, strict=True)
        ]
        if self.rank == 0:
            event = {"event": "steps", "records": records, "total_steps": self.total_steps}
            self.board.post([event | {"seconds": now - self.started}])
        self.sums, self.steps, self.norms, self.busy, self.started = [], [], [], [], now
        return records, granted
