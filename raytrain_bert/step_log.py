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
from raytrain_bert.step import StepResult

FIGURES = 5
"""Of each step: loss sum, weight, rows, tokens, tokens with padding."""


class StepLog:
    """Per-step figures, summed over the ranks a few steps at a time and posted by rank 0.

    The exchange also carries wishes (to stop, to save, ...), so that every rank learns of them at the same step.
    """

    def __init__(self, board: BoardClient, rank: int, device: torch.device, *, every: int, total_steps: int) -> None:
        self.board, self.rank, self.device = board, rank, device
        self.every, self.total_steps = every, total_steps
        self.sums: list[Tensor] = []
        self.steps: list[dict[str, Any]] = []
        self.norms: list[Tensor] = []
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

        The same on every rank. Each gives as many wishes, at most as many as a step has figures.
        """
        figures = [float(wish) for wish in wishes] + [0.0] * (FIGURES - len(wishes))
        mine = torch.tensor([figures], dtype=torch.float64, device=self.device)
        sums = parallel.sum_over_ranks(torch.cat([*(row[None] for row in self.sums), mine])).tolist()
        granted = [figure > 0 for figure in sums.pop()[: len(wishes)]]
        if not self.steps:
            return [], granted
        norms = torch.stack(self.norms).tolist()
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
            }
            for step, norm, (loss, weight, rows, tokens, padded) in zip(self.steps, norms, sums, strict=True)
        ]
        if self.rank == 0:
            event = {"event": "steps", "records": records, "total_steps": self.total_steps}
            self.board.post([event | {"seconds": now - self.started}])
        self.sums, self.steps, self.norms, self.started = [], [], [], now
        return records, granted
