from __future__ import annotations

import pyarrow as pa
import pytest

from raytrain_bert.config.errors import DataError
from raytrain_bert.config.schema import DataConfig
from raytrain_bert.data.columns import Columns, choose_columns

CONTENT = {
    "text": [f"A sentence of some length, number {i}, that says nothing." for i in range(12)],
    "longer": [f"A paragraph, number {i}. It goes on, and on, and on. {'More of the same. ' * 6}" for i in range(12)],
    "short": [f"title {i}" for i in range(12)],
    "label": ["pos", "neg", "pos", "neg"] * 3,
    "digits": ["1", "2", "3"] * 4,
    "id": [str(1000 + i) for i in range(12)],
    "constant": ["train"] * 12,
    "empty": [None] * 12,
}


def choose(kinds: dict[str, str], **settings: str) -> Columns:
    """Choose among columns with these names, each with content of some kind."""
    sample = pa.table({name: pa.array(CONTENT[kind], pa.string()) for name, kind in kinds.items()})
    return choose_columns(sample, DataConfig.model_validate(settings), "data.csv")


@pytest.mark.parametrize(
    ("kinds", "text", "pair", "label"),
    [
        ({"text": "text", "label": "label"}, "text", None, "label"),
        ({"Review": "text", "Liked": "digits"}, "Review", None, "Liked"),
        ({"v1": "label", "v2": "text", "2": "empty", "3": "empty"}, "v2", None, "v1"),
        ({"0": "id", "reviewText": "text", "overall_rating": "digits"}, "reviewText", None, "overall_rating"),
        ({"text": "text", "label": "digits", "label_text": "label"}, "text", None, "label"),
        ({"Quality": "digits", "#1 ID": "id", "#1 String": "text", "#2 String": "text"},
         "#1 String", "#2 String", "Quality"),
        ({"premise": "text", "hypothesis": "text", "label": "label"}, "premise", "hypothesis", "label"),
        ({"question": "text", "sentence": "text", "label": "label", "idx": "id"}, "question", "sentence", "label"),
        ({"title": "short", "content": "longer", "topic": "label"}, "content", None, "topic"),
        ({"0": "text", "1": "label"}, "0", None, "1"),
        ({"0": "digits", "1": "short", "2": "longer"}, "2", None, "0"),
        ({"0": "text", "1": "label", "2": "id"}, "0", None, "1"),
        ({"kommentar": "text", "kategorie": "label", "quelle": "constant"}, "kommentar", None, "kategorie"),
        ({"text_id": "id", "narrative": "text", "Product": "label"}, "narrative", None, "Product"),
    ],
)  # fmt: skip
def test_columns_are_found_by_name_or_content(kinds: dict[str, str], text: str, pair: str | None, label: str) -> None:
    assert choose(kinds) == Columns(text, pair, label)


def test_named_columns_win() -> None:
    kinds = {"text": "text", "title": "short", "label": "label", "stars": "digits"}
    assert choose(kinds, text_column="title", label_column="stars") == Columns("title", None, "stars")
    assert choose(kinds, text_pair_column="title") == Columns("text", "title", "label")


def test_numbers_count_columns_with_and_without_header() -> None:
    assert choose(
        {"a": "text", "b": "short", "c": "digits", "d": "label"}, text_column="1", label_column="2"
    ) == Columns("b", None, "c")
    assert choose({"0": "text", "1": "digits", "2": "label"}, label_column="1").label == "1"


def test_unknown_column_names_what_is_there_and_what_is_near() -> None:
    with pytest.raises(
        DataError, match=r"data.csv: no column 'lable'; columns are text, Label\. Did you mean 'Label'\?"
    ):
        choose({"text": "text", "Label": "label"}, label_column="lable")
    with pytest.raises(DataError, match=r"no column '7'.*--data.text-column"):
        choose({"text": "text", "Label": "label"}, text_column="7")
    assert choose({"text": "text", "Label": "label"}, label_column="label").label == "Label"


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ({"0": "label", "1": "digits", "2": "text"},
         r"could be the label: '0' \(2 values such as 'pos'\); '1'.*label-column"),
        ({"coarse_label": "label", "fine_label": "digits", "text": "text"}, r"the label: 'coarse_label'.*'fine_label'"),
        ({"0": "text", "1": "text", "2": "label"}, r"could be the text: '0' .*; '1' .*--data.text-pair-column"),
        ({"review": "text", "comment": "text", "label": "label"}, r"could be the text: 'review'.*'comment'"),
        ({"text": "text", "id": "id"}, r"no column looks like a label; columns are text, id"),
        ({"0": "text"}, r"The file has one column: set --data.delimiter"),
        ({"a": "id", "b": "digits", "label": "label"}, r"no column holds text; columns are a, b, label"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_says_which_flag_to_set(kinds: dict[str, str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        choose(kinds)


def test_one_column_cannot_be_two_things() -> None:
    with pytest.raises(DataError, match="'text' cannot be used twice"):
        choose({"text": "text", "label": "label"}, label_column="text", text_column="text")
