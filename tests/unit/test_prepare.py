"""From a file to token rows, through Ray Data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import ray

from raytrain_bert.config.errors import DataError
from raytrain_bert.config.schema import DataConfig
from raytrain_bert.data import tokenise as tokenise_module
from raytrain_bert.data.prepare import PreparedData, prepare_data
from tests.tiny import WORDS, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("local_ray")


def make_frame(rows: int = 120) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, rng.integers(1, 12))) for _ in range(rows)]
    texts[100:110] = texts[:10]
    return pd.DataFrame({"text": texts, "label": rng.choice(["10", "2", "1"], rows)})


def prepare(tmp_path: Path, frame: pd.DataFrame, **settings: Any) -> PreparedData:
    path = tmp_path / "rows.csv"
    frame.to_csv(path, index=False)
    config = DataConfig.model_validate({"train": str(path), "cache_dir": str(tmp_path / "cache")} | settings)
    return prepare_data(config, tiny_tokenizer(), 16)


def rows_of(data: PreparedData) -> pa.Table:
    return pa.concat_tables(ray.get(data.dataset.to_arrow_refs()))


def test_rows_keep_their_order_tokens_and_labels(tmp_path: Path) -> None:
    frame = make_frame()
    data = prepare(tmp_path, frame)
    table = rows_of(data)
    expected = tiny_tokenizer()(frame["text"].tolist(), truncation=True, max_length=16)["input_ids"]
    assert table["input_ids"].to_pylist() == expected
    assert data.lengths.tolist() == [len(ids) for ids in expected]
    assert data.labels.names == ("1", "2", "10")
    assert [data.labels.names[i] for i in table["label_id"].to_pylist()] == frame["label"].tolist()
    assert table["row"].to_pylist() == list(range(1, 121))


def test_each_row_is_in_one_split_and_duplicates_share_theirs(tmp_path: Path) -> None:
    frame = make_frame()
    data = prepare(tmp_path, frame)
    assert sum(data.num_rows.values()) == 120
    assert rows_of(data)["split"].to_pylist() == data.splits.tolist()
    assert frame.assign(split=data.splits).groupby("text")["split"].nunique().max() == 1


def test_given_files_are_their_own_splits(tmp_path: Path) -> None:
    frame = make_frame()
    frame[:30].to_csv(tmp_path / "validation.csv", index=False)
    frame[30:50].to_csv(tmp_path / "test.csv", index=False)
    data = prepare(tmp_path, frame[50:], validation=str(tmp_path / "validation.csv"), test=str(tmp_path / "test.csv"))
    assert data.num_rows == {"train": 70, "validation": 30, "test": 20}
    assert any("also in the training data" in warning for warning in data.warnings)


def test_the_second_time_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(tmp_path, make_frame())

    def refuse(*arguments: object) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr("raytrain_bert.data.prepare.tokenise", refuse)
    second = prepare(tmp_path, make_frame())
    assert rows_of(second).to_pylist() == rows_of(first).to_pylist()
    assert second.fingerprint == first.fingerprint
    with pytest.raises(AssertionError, match="tokenised again"):
        prepare(tmp_path, make_frame(), cache=False)
    assert tokenise_module.tokenise is not refuse


def test_the_fingerprint_changes_with_a_label_and_with_the_split(tmp_path: Path) -> None:
    frame = make_frame()
    other = frame.copy()
    other.loc[5, "label"] = "1" if other.loc[5, "label"] != "1" else "2"
    prints = {
        prepare(tmp_path, frame).fingerprint,
        prepare(tmp_path, other).fingerprint,
        prepare(tmp_path, frame, split_seed=1).fingerprint,
    }
    assert len(prints) == 3


def test_bad_rows_are_an_error_or_left_out(tmp_path: Path) -> None:
    frame = make_frame()
    frame.loc[3, "label"] = None
    frame.loc[7, "text"] = " "
    with pytest.raises(DataError) as caught:
        prepare(tmp_path, frame)
    assert "rows.csv, row 4" in str(caught.value)
    assert "rows.csv, row 8" in str(caught.value)
    data = prepare(tmp_path, frame, bad_rows="skip")
    assert sum(data.num_rows.values()) == 118
    assert any("2 rows are left out" in warning for warning in data.warnings)


def test_too_few_rows_for_a_validation_split_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="validation split has no rows"):
        prepare(tmp_path, pd.DataFrame({"text": ["good", "bad"], "label": ["1", "2"]}))
