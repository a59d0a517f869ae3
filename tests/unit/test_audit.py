"""Bad rows are told together with file and row; duplicates, conflicts and overlaps are counted."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from raytrain_bert.config.errors import DataError
from raytrain_bert.data import audit
from raytrain_bert.data.labels import LabelSpace

SPACE = LabelSpace(("no", "yes"))


def describe(
    texts: list[str | None], labels: list[str | None], pairs: list[str | None] | None = None
) -> audit.Described:
    rows = len(texts)
    table = pa.table(
        {
            "text": pa.array(texts, pa.string()),
            "text_pair": pa.array(pairs or [None] * rows, pa.string()),
            "label": pa.array(labels, pa.string()),
            "file": pa.array([0] * rows, pa.int32()),
            "row": pa.array(range(1, rows + 1), pa.int64()),
        }
    )
    return audit.described([audit.describe_block(table)], ("reviews.csv",))


def test_bad_rows_are_told_with_file_and_row() -> None:
    rows = describe(["a", " ", "c", "d", None], ["yes", "yes", "", "perhaps", "no"])
    bad = audit.find_bad_rows(rows, SPACE)
    assert {reason: found.tolist() for reason, found in bad.items()} == {
        "no text": [1, 4],
        "no label": [2],
        "unknown label": [3],
    }
    with pytest.raises(DataError) as caught:
        audit.refuse_bad_rows({"train": (rows, bad)}, SPACE)
    assert "reviews.csv, row 2" in str(caught.value)
    assert "reviews.csv, row 4 ('perhaps')" in str(caught.value)
    assert "--data.bad-rows skip" in str(caught.value)


def test_white_space_around_labels_does_not_count() -> None:
    assert not audit.find_bad_rows(describe(["a", "b"], [" yes", "no "]), SPACE)


def test_duplicates_and_conflicts_are_counted_as_pandas_does() -> None:
    rng = np.random.default_rng(0)
    texts = [f"text {i}" for i in rng.integers(0, 40, 100)]
    labels = [SPACE.names[i] for i in rng.integers(0, 2, 100)]
    rows = describe(texts, labels)
    groups = audit.group_duplicates(rows.text_ids)
    frame = pd.DataFrame({"text": texts, "label": labels})
    assert audit.count_duplicates(groups) == int(frame.duplicated("text").sum())
    expected = int((frame.groupby("text")["label"].nunique() > 1).sum())
    assert audit.count_conflicts(groups, SPACE.ids(rows.labels)) == expected


def test_a_pair_is_the_same_only_with_both_texts_the_same() -> None:
    rows = describe(["a", "a", "a"], ["no"] * 3, pairs=["x", "y", "x"])
    assert audit.count_duplicates(audit.group_duplicates(rows.text_ids)) == 1


def test_overlap_between_two_sources() -> None:
    train, test = describe(["a", "b", "c"], ["no"] * 3), describe(["c", "x", "c"], ["no"] * 3)
    assert audit.count_overlap(test.text_ids, train.text_ids) == 2
