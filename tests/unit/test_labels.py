"""The label space: order, ids, refusals."""

from __future__ import annotations

import pyarrow as pa
import pytest

from raytrain_bert.config.errors import DataError
from raytrain_bert.data.labels import make_label_space


def test_numbers_are_sorted_by_value() -> None:
    assert make_label_space(["10", "2", "1"]).names == ("1", "2", "10")


def test_names_are_sorted_as_text() -> None:
    assert make_label_space(["b", "a", "10"]).names == ("10", "a", "b")


def test_given_names_keep_their_order() -> None:
    assert make_label_space(["a", "b"], given=["b", "a", "c"]).names == ("b", "a", "c")


def test_ids_of_missing_and_unknown_labels_are_minus_one() -> None:
    space = make_label_space(["a", "b"])
    assert space.ids(pa.array(["b", None, "x", "a"])).tolist() == [1, -1, -1, 0]


@pytest.mark.parametrize("labels", [[], ["a"]])
def test_fewer_than_two_classes_are_refused(labels: list[str]) -> None:
    with pytest.raises(DataError, match="at least two"):
        make_label_space(labels)
