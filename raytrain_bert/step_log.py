"""Figures of each optimizer step, summed over the ranks a few steps at a time."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor

from raytrain_bert import parallel
from raytrain_bert.batching.collate import MicroBatch
from raytrain_bert.progress.board import BoardClient


class StepLog:
    """Per-step figures, summed over the ranks a few steps at a time and posted by rank 0.

    The exchange also carries the wish to stop, so that every rank learns of it at the same step.
    """

    def __init__(self, board: BoardClient, rank: int, device: torch.device, *, every: int, total_steps: int) -> None:
        self.board, self.rank, self.device = board, rank, device
        self.every, self.total_steps = every, total_steps
        self.sums: list[Tensor] = []
        self.steps: list[dict[str, Any]] = []
        self.norms: list[Tensor] = []
        self.started = time.monotonic()
        self.stop_requested = False

    def add(
        self,
        epoch: int,
        step: int,
        loss_sum: Tensor,
        grad_norm: Tensor,
        learning_rate: float,
        micro_batches: list[MicroBatch],
    ) -> None:
        """Note one step of this rank: the sum of its losses () and what it forwarded."""
        counts = [
            sum(len(b.rows) for b in micro_batches),
            sum(b.num_tokens for b in micro_batches),
            sum(b.num_padded_tokens for b in micro_batches),
        ]
        self.sums.append(torch.cat([loss_sum.reshape(1), loss_sum.new_tensor(counts)]))
        self.norms.append(grad_norm.detach())
        self.steps.append({"epoch": epoch, "step": step, "learning_rate": learning_rate})

    def is_due(self) -> bool:
        """Whether it is time for the exchange; the same answer on every rank."""
        return len(self.steps) >= self.every

    def restart_clock(self) -> None:
        """Leave out the time since the last exchange: a validation or a checkpoint fell into it."""
        assert not self.steps, "flushed before"
        self.started = time.monotonic()

    def flush(self) -> None:
        """Sum over the ranks, post, and learn whether a stop is wanted."""
        if not self.steps:
            return
        wants_stop = self.rank == 0 and self.board.stop_requested()
        flag = torch.tensor([[float(wants_stop), 0, 0, 0]], dtype=torch.float64, device=self.device)
        sums = parallel.sum_over_ranks(torch.cat([torch.stack(self.sums), flag])).tolist()
        self.stop_requested = sums.pop()[0] > 0
        norms = torch.stack(self.norms).tolist()
        now = time.monotonic()
        records = [
            {
                **step,
                "loss": loss / rows if rows else math.nan,
                "grad_norm": norm,
                "rows": int(rows),
                "tokens": int(tokens),
                "padded_tokens": int(padded),
                "seconds": (now - self.started) / len(self.steps),
            }
            for step, norm, (loss, rows, tokens, padded) in zip(self.steps, norms, sums, strict=True)
        ]
        if self.rank == 0:
            event = {"event": "steps", "records": records, "total_steps": self.total_steps}
            self.board.post([event | {"seconds": now - self.started}])
        self.sums, self.steps, self.norms, self.started = [], [], [], now
