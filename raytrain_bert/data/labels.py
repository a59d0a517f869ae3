"""The label space: which labels there are, in which order, made once and used everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raytrain_bert.config.errors import DataError


@dataclass(frozen=True)
class LabelSpace:
    """Single-label classes; a label's id is its position."""

    names: tuple[str, ...]

    def __len__(self) -> int:
        """Number of classes."""
        return len(self.names)

    def ids(self, labels: pa.Array | pa.ChunkedArray) -> NDArray[np.int32]:
        """Ids of label strings, -1 for missing and unknown ones."""
        found = pc.fill_null(pc.index_in(labels, value_set=pa.array(self.names, pa.string())), -1)
        return np.asarray(found.to_numpy(), dtype=np.int32)


def make_label_space(labels: Iterable[str], given: Sequence[str] | None = None) -> LabelSpace:
    """Make the label space of the training labels: given names as they stand, else numeric or sorted order.

    Raises:
        DataError: fewer than two classes.
    """
    names = list(dict.fromkeys(given)) if given else sort_labels(set(labels))
    if len(names) < 2:
        raise DataError(
            f"The training data has {len(names)} label{'' if len(names) == 1 else 's'} ({', '.join(names) or 'none'}); "
            "a classifier needs at least two. Check --data.label-column."
        )
    return LabelSpace(tuple(names))


def sort_labels(labels: Iterable[str]) -> list[str]:
    """Sort labels: numbers by value (2 before 10), anything else as text."""
    names = sorted(labels)
    try:
        return sorted(names, key=float)
    except ValueError:
        return names
