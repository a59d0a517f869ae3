"""The seeded stratified split; duplicates of one text stay on one side."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TRAIN, VALIDATION, TEST, UNUSED = 0, 1, 2, -1
SPLITS = {"train": TRAIN, "validation": VALIDATION, "test": TEST}


def stratified_split(
    label_ids: NDArray[np.integer],
    groups: NDArray[np.integer],
    fractions: dict[int, float],
    seed: int,
) -> NDArray[np.int8]:
    """Assign rows to splits: (rows,), (rows,) -> (rows,) of TRAIN, VALIDATION, TEST.

    Args:
        label_ids: class of each row.
        groups: equal numbers mark rows that must stay together (exact duplicates).
        fractions: share of each class that each split other than TRAIN takes.
        seed: the same seed gives the same split.

    Each class gives its share to each split, to the nearest row; a class of at least three texts gives each split
    at least one row. A group counts to the class of its first row.
    """
    assigned = np.full(len(label_ids), TRAIN, dtype=np.int8)
    _, first, group = np.unique(groups, return_index=True, return_inverse=True)
    group_label = label_ids[first]
    group_size = np.bincount(group, minlength=len(first))
    group_split = np.full(len(first), TRAIN, dtype=np.int8)
    for label in np.unique(group_label):
        # One generator per class: adding a class leaves the others' split as it was.
        rng = np.random.default_rng([seed, int(label)])
        members = np.flatnonzero(group_label == label)
        # A text that is repeated more often than a split has room for stays in training: it would swamp the split.
        room = min((share for share in fractions.values() if share > 0), default=1.0) * group_size[members].sum()
        fits = group_size[members] <= max(room, 1.0)
        members = np.concatenate([rng.permutation(members[fits]), members[~fits]])
        ends = np.cumsum(group_size[members])
        start = 0
        for position, (split, fraction) in enumerate(fractions.items()):
            if fraction <= 0:
                continue
            wanted = (ends[start - 1] if start else 0) + fraction * ends[-1]
            stop = int(np.searchsorted(ends, wanted + 0.5, side="right"))
            must_leave = len(fractions) - position  # groups left for the splits to come and for training
            at_least = start + 1 if len(members) > len(fractions) else start
            stop = max(start, min(max(stop, at_least), len(members) - must_leave, int(fits.sum())))
            group_split[members[start:stop]] = split
            start = stop
    assigned[:] = group_split[group]
    return assigned
