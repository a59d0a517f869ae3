"""The receipt of an epoch: how often each training row was seen, counted on every rank and summed over all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raytrain_bert import parallel


@dataclass(frozen=True)
class EpochReceipt:
    """What one epoch (or the part of it that was trained) was made of."""

    epoch: int
    """From 0."""
    rows: int
    """Training rows that there are."""
    rows_seen: int
    """Rows seen at least once."""
    repeated: int
    """Rows seen more than once."""
    rows_per_rank: list[int] | None
    """Rows that each rank served; None where the number of ranks changed within the epoch."""
    is_whole: bool
    """Whether the epoch was trained to its end."""

    def fields(self) -> dict[str, Any]:
        """As an event tells it."""
        return {
            "rows": self.rows,
            "rows_seen": self.rows_seen,
            "repeated": self.repeated,
            "rows_per_rank": self.rows_per_rank,
            "is_whole": self.is_whole,
        }


class Receipt:
    """Counts of the epoch under way; a count is one byte, so 255 repetitions at most are told apart."""

    def __init__(self, num_rows: int, rank: int, world_size: int, device: torch.device) -> None:
        """Nothing seen yet; `device` is where the ranks exchange."""
        self.rank, self.device = rank, device
        self.counts: NDArray[np.uint8] = np.zeros(num_rows, dtype=np.uint8)
        """Rows that this rank served (rank 0: and those of a checkpoint that was gone on from)."""
        self.served = np.zeros(world_size, dtype=np.int64)
        """Rows that each rank served; each rank counts its own."""
        self.ranks_are_the_same = True

    def add(self, rows: NDArray[np.integer]) -> None:
        """Note rows of the training split (by position) that this rank has served."""
        np.add.at(self.counts, rows, 1)
        self.served[self.rank] += len(rows)

    def over_all_ranks(self) -> tuple[Tensor, list[int] | None]:
        """Counts (rows,) uint8 and rows by rank, summed; every rank calls it."""
        # A copy: on CPU the tensor would share its memory with the counts.
        counts = parallel.sum_over_ranks(torch.from_numpy(self.counts.copy()).to(self.device)).cpu()
        served = parallel.sum_over_ranks(torch.from_numpy(self.served.copy()).to(self.device)).tolist()
        return counts, served if self.ranks_are_the_same else None

    def restore(self, counts: Tensor, rows_per_rank: list[int] | None) -> None:
        """Go on from a checkpoint's counts, which are those of all ranks."""
        self.counts[:] = counts.numpy() if self.rank == 0 else 0
        self.ranks_are_the_same = rows_per_rank is not None and len(rows_per_rank) == len(self.served)
        self.served[:] = 0
        if rows_per_rank is not None and self.ranks_are_the_same:
            self.served[self.rank] = rows_per_rank[self.rank]

    def close(self, epoch: int, *, is_whole: bool) -> EpochReceipt:
        """The receipt over all ranks; the counts start anew. Every rank calls it.

        Raises:
            AssertionError: a row was seen twice, or a whole epoch left one out.
        """
        counts, rows_per_rank = self.over_all_ranks()
        seen, repeated = int((counts > 0).sum()), int((counts > 1).sum())
        receipt = EpochReceipt(epoch, len(counts), seen, repeated, rows_per_rank, is_whole)
        assert not repeated, f"epoch {epoch}: {repeated} rows were seen more than once"
        assert seen == len(counts) or not is_whole, f"epoch {epoch}: {seen} of {len(counts)} rows were seen"
        self.counts[:] = 0
        self.served[:] = 0
        self.ranks_are_the_same = True
        return receipt
