"""From rows of an Arrow table of tokens to the tensors of one micro batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor


class TokenRows:
    """Random access to the token rows of a table; the tokens stay where they are, in Ray's object store.

    The table has the columns `input_ids` (lists of unsigned integers), `second_start` (where the second text of a pair
    starts, 0 for none) and `label_id`.
    """

    def __init__(self, table: pa.Table) -> None:
        chunks = [chunk for chunk in table["input_ids"].chunks if len(chunk)]
        assert not any(chunk.null_count for chunk in chunks), "a row without input_ids"
        # Offsets know about slices of a chunk, values do not: both count from the start of the whole buffer.
        offsets = [chunk.offsets.to_numpy() for chunk in chunks]
        self._values = [chunk.values.to_numpy(zero_copy_only=True) for chunk in chunks]
        self._first_rows = np.cumsum([0] + [len(chunk) for chunk in chunks])[:-1]
        self._starts = _join([chunk[:-1] for chunk in offsets])
        self.lengths: NDArray[np.int32] = _join([np.diff(chunk) for chunk in offsets]).astype(np.int32)
        self.second_starts: NDArray[np.int32] = _column(table["second_start"])
        self.label_ids: NDArray[np.int32] = _column(table["label_id"])

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    def tokens(self, positions: NDArray[np.integer]) -> Iterator[NDArray[np.unsignedinteger]]:
        """Token ids of some rows, as views."""
        chunks = np.searchsorted(self._first_rows, positions, side="right") - 1
        starts = self._starts[positions]
        ends = starts + self.lengths[positions]
        for chunk, start, end in zip(chunks.tolist(), starts.tolist(), ends.tolist(), strict=True):
            yield self._values[chunk][start:end]


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass takes, padded on the right to its longest row."""

    input_ids: Tensor  # (rows, length) int64
    attention_mask: Tensor  # (rows, length) int64, 1 for real tokens
    token_type_ids: Tensor | None  # (rows, length) int64, 1 for the second text of a pair
    labels: Tensor  # (rows,) int64
    rows: NDArray[np.int64]  # positions in the table
    num_tokens: int  # real ones
    num_padded_tokens: int  # rows x length

    def to(self, device: torch.device | str, non_blocking: bool = True) -> MicroBatch:
        """Copy to a device, through pinned memory where it is CUDA, so that the CPU does not wait."""
        device = torch.device(device)

        def move(tensor: Tensor) -> Tensor:
            if device.type == "cuda" and tensor.device.type == "cpu" and non_blocking:
                tensor = tensor.pin_memory()
            return tensor.to(device, non_blocking=non_blocking)

        return replace(
            self,
            input_ids=move(self.input_ids),
            attention_mask=move(self.attention_mask),
            token_type_ids=None if self.token_type_ids is None else move(self.token_type_ids),
            labels=move(self.labels),
        )

    def inputs(self) -> dict[str, Tensor]:
        """Keyword arguments of the model, without the labels."""
        inputs = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        return inputs if self.token_type_ids is None else inputs | {"token_type_ids": self.token_type_ids}


def collate(
    rows: TokenRows,
    positions: NDArray[np.integer],
    *,
    pad_token_id: int,
    token_type_ids: bool,
    pad_to_multiple_of: int = 1,
) -> MicroBatch:
    """Pad some rows, at least one, on the right to the longest of them, rounded up to `pad_to_multiple_of`."""
    assert len(positions), "a micro batch has at least one row"
    lengths = rows.lengths[positions]
    length = -(-int(lengths.max()) // pad_to_multiple_of) * pad_to_multiple_of
    input_ids = np.full((len(positions), length), pad_token_id, dtype=np.int64)
    # A loop over rows, not tokens: a slice assignment is one cast and copy.
    for line, tokens in zip(input_ids, rows.tokens(positions), strict=True):
        line[: len(tokens)] = tokens
    column = np.arange(length)
    real = column < lengths[:, None]
    second = None
    if token_type_ids:
        starts = rows.second_starts[positions][:, None]
        second = torch.from_numpy((real & (starts > 0) & (column >= starts)).astype(np.int64))
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        attention_mask=torch.from_numpy(real.astype(np.int64)),
        token_type_ids=second,
        labels=torch.from_numpy(rows.label_ids[positions].astype(np.int64)),
        rows=np.asarray(positions, dtype=np.int64),
        num_tokens=int(lengths.sum(dtype=np.int64)),
        num_padded_tokens=input_ids.size,
    )


def _join(parts: list[NDArray[np.integer]]) -> NDArray[np.int64]:
    """Concatenate, where there may be nothing to."""
    return np.concatenate([np.empty(0, np.int64), *parts])


def _column(column: pa.ChunkedArray) -> NDArray[np.int32]:
    """One int32 for each row; 4 bytes a row may be copied."""
    assert column.null_count == 0, "a row without second_start or label_id"
    return np.asarray(column.to_numpy(), dtype=np.int32)
