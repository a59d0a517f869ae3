from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import datasets
import pandas as pd
import pytest
import ray
import ray.data

from raytrain_bert.config.errors import DataError
from raytrain_bert.config.schema import DataConfig
from raytrain_bert.data.read import SCHEMA, Rows, read_splits

pytestmark = pytest.mark.usefixtures("local_ray")


def read(train: Path | str | list[str], **settings: object) -> dict[str, Rows]:
    paths = train if isinstance(train, list) else [str(train)]
    return read_splits(DataConfig.model_validate({"train": paths, **settings}))


def frame(rows: Rows) -> pd.DataFrame:
    tables = ray.get(rows.dataset.to_arrow_refs())
    assert all(table.schema.equals(SCHEMA) for table in tables if table.num_rows)
    return pd.concat([table.to_pandas() for table in tables if table.num_rows], ignore_index=True)


def reviews(count: int = 6, start: int = 0) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "review": [f"Review {i}, which says\nthat it was fine." for i in range(start, start + count)],
            "stars": [str(i % 3) for i in range(start, start + count)],
        }
    )


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    expected = reviews()
    expected.to_csv(tmp_path / "a.csv", index=False)
    expected.to_csv(tmp_path / "a.tsv", index=False, sep="\t")
    expected.to_csv(tmp_path / "a.csv.gz", index=False)
    expected.to_csv(tmp_path / "latin.csv", index=False, encoding="utf-16", sep=";")
    expected.astype({"stars": int}).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress((tmp_path / "a.parquet").read_bytes()))
    expected.astype({"stars": int}).to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    expected.to_json(tmp_path / "a.json", orient="records")
    for name in sorted(os.listdir(tmp_path)):
        rows = read(tmp_path / name)["train"]
        found = frame(rows)
        assert found["text"].tolist() == expected["review"].tolist(), name
        assert found["label"].tolist() == expected["stars"].tolist(), name
        assert found["text_pair"].isna().all()
        assert (found["file"] == 0).all()
        assert found["row"].tolist() == [1, 2, 3, 4, 5, 6]
        assert rows.files == (str(tmp_path / name),)


def test_findings_say_what_was_found_out(tmp_path: Path) -> None:
    reviews().to_csv(tmp_path / "a.csv", index=False)
    (tmp_path / "b.txt").write_text("good one\tx\nbad one\ty\nso so\tx\n")
    assert read(tmp_path / "a.csv")["train"].findings == (
        ("format", "CSV, utf-8, comma, header"),
        ("text", "review"),
        ("label", "stars"),
    )
    assert read(tmp_path / "b.txt")["train"].findings == (
        ("format", "TSV, utf-8, tabulator, no header, quotes are ordinary"),
        ("text", "column 0 (from 0)"),
        ("label", "column 1 (from 0)"),
    )


def test_many_files_keep_their_order_and_their_own_format(tmp_path: Path) -> None:
    for i in range(70):  # more than are looked into
        part = reviews(3, start=3 * i)
        columns = ["review", "stars"] if i % 2 else ["stars", "review"]
        part.to_csv(tmp_path / f"part-{i:02}.csv", index=False, columns=columns, sep=";" if i == 5 else ",")
    (tmp_path / "part-69.csv").write_bytes("review,stars\nschön,0\nA – B,1\nC,2\n".encode("cp1252"))
    rows = read(tmp_path)["train"]
    found = frame(rows)
    expected = [*reviews(207)["review"], "schön", "A – B", "C"]
    assert found["text"].tolist() == expected
    assert found["file"].tolist() == [i for i in range(70) for _ in range(3)]
    assert found["row"].tolist() == [1, 2, 3] * 70
    assert rows.files[69].endswith("part-69.csv")


def test_a_big_file_becomes_several_blocks_in_order(tmp_path: Path) -> None:
    count = 60_000
    big = pd.DataFrame({"text": [f"{i} {'word ' * 40}" for i in range(count)], "label": ["a", "b"] * (count // 2)})
    big.to_csv(tmp_path / "big.csv", index=False)
    rows = read(tmp_path / "big.csv")["train"]
    assert rows.dataset.num_blocks() > 2
    found = frame(rows)
    assert found["row"].tolist() == list(range(1, count + 1))
    assert found["text"].tolist() == big["text"].tolist()


def test_folder_per_class(tmp_path: Path) -> None:
    for i in range(300):
        folder = tmp_path / ("neg" if i < 150 else "pos")
        folder.mkdir(exist_ok=True)
        (folder / f"{i:03}.txt").write_bytes(f"\n Text {i} é\n".encode("cp1252" if i == 7 else "utf-8"))
    (tmp_path / "pos" / "999.txt").write_text(" \n")
    rows = read(tmp_path)["train"]
    found = frame(rows)
    assert found["text"].tolist()[:300] == [f"Text {i} é" for i in range(300)]
    assert found["label"].tolist() == ["neg"] * 150 + ["pos"] * 151
    assert found["text"].isna().tolist() == [False] * 300 + [True]
    assert found["file"].tolist() == list(range(301))
    assert (found["row"] == 1).all()
    assert ("label", "folder (neg, pos)") in rows.findings


def test_other_splits_use_the_columns_of_training(tmp_path: Path) -> None:
    pd.DataFrame({"body": ["a b", "c d"], "mood": ["x", "y"], "topic": ["u", "v"]}).to_csv(
        tmp_path / "a.csv", index=False
    )
    pd.DataFrame({"mood": ["y"], "label": ["no"], "body": ["e f"]}).to_json(
        tmp_path / "b.jsonl", orient="records", lines=True
    )
    settings = {"validation": str(tmp_path / "b.jsonl"), "label_column": "mood"}
    splits = read(tmp_path / "a.csv", **settings)
    assert list(splits) == ["train", "validation"]
    assert frame(splits["validation"])[["text", "label"]].to_numpy().tolist() == [["e f", "y"]]
    pd.DataFrame({"text": ["e f"], "topic": ["u"]}).to_csv(tmp_path / "c.csv", index=False)
    with pytest.raises(DataError, match=r"c.csv: no column 'body'; columns are text, topic"):
        read(tmp_path / "a.csv", test=str(tmp_path / "c.csv"), label_column="topic")


def test_rows_without_text_or_label_are_kept_for_the_audit(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\ngood one,x\n,y\nbad one,\nNA,x\nshort\n")
    found = frame(read(tmp_path / "a.csv")["train"]).astype(object).where(lambda f: f.notna(), None)
    assert found["text"].tolist() == ["good one", None, "bad one", "NA", "short"]
    assert found["label"].tolist() == ["x", "y", None, "x", None]


def test_errors_of_a_worker_come_out_as_they_were_raised(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = [f"text number {i},x{i % 3}" for i in range(20_000)]
    (tmp_path / "a.csv").write_text("\n".join(["text,label", *lines, "one, two,x1"]))
    capfd.readouterr()
    with pytest.raises(DataError) as caught:
        read(tmp_path / "a.csv")
    assert type(caught.value) is DataError
    assert str(caught.value) == (
        f"{tmp_path}/a.csv: row 20001 has 3 cells, not 2: one, two,x1. Quote text that holds a comma, or set "
        "--data.delimiter and --data.quoting."
    )
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert capfd.readouterr() == ("", "")


def test_reading_is_quiet_and_leaves_ray_data_as_it_was(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    context = ray.data.DataContext.get_current()
    before = (context.enable_progress_bars, context.target_max_block_size, context.execution_options.preserve_order)
    reviews().to_csv(tmp_path / "a.csv", index=False)
    capfd.readouterr()
    read(tmp_path / "a.csv")
    assert capfd.readouterr() == ("", "")
    after = (context.enable_progress_bars, context.target_max_block_size, context.execution_options.preserve_order)
    assert after == before


def saved_dataset(labels: list[int], prefix: str = "text") -> datasets.Dataset:
    features = datasets.Features(
        {
            "premise": datasets.Value("large_string"),
            "hypothesis": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["zero", "one"]),
        }
    )
    columns = {
        "premise": [f"{prefix} {i}" for i in range(len(labels))],
        "hypothesis": [f"pair {i}" for i in range(len(labels))],
        "label": labels,
    }
    return datasets.Dataset.from_dict(columns, features=features)


def test_saved_dataset_dict_gives_its_splits_and_class_names(tmp_path: Path) -> None:
    parts = {"train": saved_dataset([1, 0, -1]), "dev": saved_dataset([0]), "test": saved_dataset([-1, -1])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    splits = read(tmp_path / "saved")
    assert list(splits) == ["train", "validation"]  # a test without labels tests nothing
    train = frame(splits["train"])
    assert train["text"].tolist() == ["text 0", "text 1", "text 2"]
    assert train["text_pair"].tolist() == ["pair 0", "pair 1", "pair 2"]
    assert train["label"].tolist()[:2] == ["one", "zero"]
    assert train["label"].isna().tolist() == [False, False, True]
    assert train["row"].tolist() == [1, 2, 3]
    assert splits["train"].label_names == ("zero", "one")
    assert splits["validation"].files == (f"{tmp_path}/saved[dev]",)


def test_saved_single_split_serves_as_asked(tmp_path: Path) -> None:
    saved_dataset([0, 1]).filter(lambda row: row["label"] == 1).save_to_disk(tmp_path / "train")
    saved_dataset([0, 0, 1], "held out").save_to_disk(tmp_path / "held_out")
    splits = read(tmp_path / "train", test=str(tmp_path / "held_out"))
    assert frame(splits["train"])["text"].tolist() == ["text 1"]
    assert frame(splits["test"])["text"].tolist() == ["held out 0", "held out 1", "held out 2"]


def test_given_file_replaces_a_split_of_the_saved_dataset(tmp_path: Path) -> None:
    datasets.DatasetDict({"train": saved_dataset([0, 1]), "test": saved_dataset([1])}).save_to_disk(tmp_path / "saved")
    line = {"premise": "mine", "hypothesis": "other", "label": "zero"}
    (tmp_path / "mine.jsonl").write_text(json.dumps(line))
    splits = read(tmp_path / "saved", test=str(tmp_path / "mine.jsonl"))
    assert frame(splits["test"])["text"].tolist() == ["mine"]


def test_saved_dataset_without_a_usable_split_or_damaged(tmp_path: Path) -> None:
    datasets.DatasetDict({"a": saved_dataset([0]), "b": saved_dataset([1])}).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match="no split for train; splits are a, b"):
        read(tmp_path / "saved")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(DataError, match="broken: cannot be loaded as a Hugging Face data set"):
        read(tmp_path / "broken")


@pytest.mark.bundled
def test_bundled_news() -> None:
    rows = read("bundled:bbc_news")["train"]
    found = frame(rows)
    counts = {"business": 510, "entertainment": 386, "politics": 417, "sports": 511, "tech": 401}
    assert found["label"].value_counts().to_dict() == counts
    for index in (0, 700, 2224):
        raw = Path(rows.files[index]).read_bytes()
        assert found["text"][index] == raw.decode("utf-8").strip()
    assert len(found) - found["text"].nunique() == 98
    assert not found["text"].str.contains("\ufffd").any()
