"""What is wrong or remarkable in the rows, told once and together, with file and row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raytrain_bert.config.errors import DataError

from .labels import LabelSpace

EXAMPLES = 3


@dataclass(frozen=True)
class Described:
    """The rows of one source without their text: what the driver needs to know of each."""

    labels: pa.Array
    """Label strings, null for missing."""
    text_ids: NDArray[np.uint64]
    """Hash of text and second text, shape (rows, 2); equal rows are exact duplicates."""
    empty: NDArray[np.bool_]
    """Rows without text."""
    files: tuple[str, ...]
    file: NDArray[np.int32]
    row: NDArray[np.int64]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.row)

    def where(self, index: int) -> str:
        """File and row of one row, for messages."""
        return f"{self.files[self.file[index]]}, row {self.row[index]}"


def describe_block(block: pa.Table) -> pa.Table:
    """Text columns -> label, two halves of a 128-bit hash of the text, and whether there is any text."""
    import hashlib

    texts, pairs = block["text"].to_pylist(), block["text_pair"].to_pylist()
    digests = b"".join(
        hashlib.blake2b(f"{text or ''}\0{'' if pair is None else pair}".encode(), digest_size=16).digest()
        for text, pair in zip(texts, pairs, strict=True)
    )
    halves = np.frombuffer(digests, dtype="<u8").reshape(-1, 2)
    label = pc.utf8_trim_whitespace(block["label"].cast(pa.string()))
    return pa.table(
        {
            "label": pc.if_else(pc.equal(label, ""), pa.scalar(None, pa.string()), label),
            "hash_1": halves[:, 0],
            "hash_2": halves[:, 1],
            "empty": np.array([not (text or "").strip() for text in texts], dtype=bool),
            "file": block["file"],
            "row": block["row"],
        }
    )


def described(tables: Sequence[pa.Table], files: tuple[str, ...]) -> Described:
    """Join the descriptions of all blocks."""
    table = pa.concat_tables(tables)
    return Described(
        labels=table["label"].combine_chunks(),
        text_ids=np.stack([table["hash_1"].to_numpy(), table["hash_2"].to_numpy()], axis=1),
        empty=table["empty"].to_numpy(),
        files=files,
        file=table["file"].to_numpy(),
        row=table["row"].to_numpy(),
    )


def find_bad_rows(rows: Described, labels: LabelSpace) -> dict[str, NDArray[np.int64]]:
    """Rows that cannot be used, by reason; a row stands under its first reason only."""
    missing = np.asarray(rows.labels.is_null())
    unknown = (labels.ids(rows.labels) < 0) & ~missing
    masks = {"no text": rows.empty, "no label": missing & ~rows.empty, "unknown label": unknown & ~rows.empty}
    return {reason: np.flatnonzero(mask) for reason, mask in masks.items() if mask.any()}


def refuse_bad_rows(found: dict[str, tuple[Described, dict[str, NDArray[np.int64]]]], labels: LabelSpace) -> None:
    """Raise one error for the bad rows of every source: {source: (rows, bad rows by reason)}.

    Raises:
        DataError: with counts, and file and row of the first few of each kind.
    """
    problems = []
    for rows, bad in found.values():
        for reason, indices in bad.items():
            examples = "; ".join(
                rows.where(i) + (f" ({rows.labels[i].as_py()!r})" if reason == "unknown label" else "")
                for i in indices[:EXAMPLES]
            )
            more = f"; and {len(indices) - EXAMPLES} more" if len(indices) > EXAMPLES else ""
            problems.append(f"{len(indices)} of {len(rows)} rows have {_article(reason)}: {examples}{more}")
    if problems:
        known = ", ".join(labels.names[:20]) + (", ..." if len(labels) > 20 else "")
        raise DataError(
            "\n".join(problems) + f"\nLabels are {known}.\nMend the rows, or leave them out with --data.bad-rows skip."
        )


def group_duplicates(text_ids: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Number the distinct texts: (rows, 2) hashes -> (rows,) group numbers."""
    _, groups = np.unique(text_ids, axis=0, return_inverse=True)
    return np.asarray(groups, dtype=np.int64).reshape(-1)


def count_duplicates(groups: NDArray[np.int64]) -> int:
    """Rows whose text stood in an earlier row."""
    return len(groups) - len(np.unique(groups))


def count_conflicts(groups: NDArray[np.int64], label_ids: NDArray[np.int32]) -> int:
    """Texts that carry more than one label."""
    pairs = np.unique(np.stack([groups, label_ids.astype(np.int64)], axis=1), axis=0)
    return int((np.unique(pairs[:, 0], return_counts=True)[1] > 1).sum())


def count_overlap(text_ids: NDArray[np.uint64], others: NDArray[np.uint64]) -> int:
    """Rows of the first whose text is also in the second."""
    kinds = text_ids.view([("a", "<u8"), ("b", "<u8")])
    return int(np.isin(kinds.reshape(-1), others.view(kinds.dtype).reshape(-1)).sum())


def _article(reason: str) -> str:
    return f"an {reason}" if reason.startswith("u") else reason
