"""Labelled text as found in the wild, against row and label counts found with independent readers."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import ray

from raytrain_bert.config.schema import DataConfig
from raytrain_bert.data.parse import parse_table
from raytrain_bert.data.read import choose_columns, detect_file, read_splits
from raytrain_bert.data.sources import read_bytes

FOLDER = Path(os.environ.get("RAYTRAIN_BERT_REALDATA") or Path(__file__).parents[3] / "shared" / "data")
PRESENT = (FOLDER / "index.json").is_file()
ENTRIES: list[dict[str, Any]] = json.loads((FOLDER / "index.json").read_text()) if PRESENT else []
TABLES = [entry for entry in ENTRIES if entry["kind"] == "delim" and entry["task"] == "classification"]
SAVED = [entry for entry in ENTRIES if entry["kind"] == "hf"]

pytestmark = pytest.mark.skipif(not PRESENT, reason=f"no real data in {FOLDER}; set RAYTRAIN_BERT_REALDATA")


def assert_counts(labels: list[str | None], entry: dict[str, Any]) -> None:
    counts = Counter(labels)
    assert len(labels) == entry["rows"]
    assert len(counts) == entry["n_classes"]
    assert {label: counts[label] for label in entry["top_counts"]} == entry["top_counts"]


@pytest.mark.parametrize("entry", TABLES, ids=lambda entry: entry["file"])
def test_table_is_read_without_any_setting(entry: dict[str, Any]) -> None:
    path = str(FOLDER / entry["file"])
    found = detect_file(path, DataConfig())
    assert found.format.delimiter == entry["delim"]
    assert found.format.header == entry["header"]
    assert found.format.quoting == entry["quote"]
    columns = choose_columns(found.sample, DataConfig(), path)
    expected = list(map(str, entry["text"]))
    # Of a title and a body the body is taken; of a pair both.
    assert [columns.text] == expected[-1:] or [columns.text, columns.text_pair] == expected
    assert columns.label == str(entry["label"])
    table = parse_table(read_bytes(path), found.format, path, columns.used)
    assert_counts(table[columns.label].to_pylist(), entry)
    assert table[columns.text].null_count == 0


@pytest.mark.parametrize("entry", TABLES, ids=lambda entry: entry["file"])
def test_text_is_that_of_another_reader(entry: dict[str, Any]) -> None:
    import csv

    path = str(FOLDER / entry["file"])
    # What the index calls latin-1 holds characters that only cp1252 has.
    encoding = entry["encoding"].replace("latin-1", "cp1252")
    with open(path, encoding=encoding, newline="") as file:
        quoting = csv.QUOTE_MINIMAL if entry["quote"] else csv.QUOTE_NONE
        rows = list(csv.reader(file, delimiter=entry["delim"], quoting=quoting))
    found = detect_file(path, DataConfig())
    columns = choose_columns(found.sample, DataConfig(), path)
    position = rows[0].index(columns.text) if entry["header"] else int(columns.text)
    table = parse_table(read_bytes(path), found.format, path, columns.used)
    assert table[columns.text].to_pylist() == [row[position] for row in rows[entry["header"] :]]


def test_splits_on_the_cluster(local_ray: None) -> None:
    entries = {entry["file"]: entry for entry in TABLES}
    splits = read_splits(
        DataConfig(
            train=[str(FOLDER / "banking77/train.csv")],
            validation=[str(FOLDER / "banking77/test.csv")],
        )
    )
    for name, file in (("train", "banking77/train.csv"), ("validation", "banking77/test.csv")):
        tables = ray.get(splits[name].dataset.to_arrow_refs())
        assert_counts([label for table in tables for label in table["label"].to_pylist()], entries[file])


def test_saved_pairs_on_the_cluster(local_ray: None) -> None:
    splits = read_splits(DataConfig(train=[str(FOLDER / SAVED[0]["file"])]))
    assert list(splits) == [entry["split"] for entry in SAVED]
    for entry in SAVED:
        rows = splits[entry["split"]]
        assert rows.label_names == ("not_equivalent", "equivalent")
        tables = ray.get(rows.dataset.to_arrow_refs())
        ids = [str(rows.label_names.index(label)) for table in tables for label in table["label"].to_pylist()]
        assert_counts([*ids], entry)
        assert all(table["text_pair"].null_count == 0 for table in tables)
