from __future__ import annotations

import gzip
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit
from xml.sax.saxutils import escape

import pytest

from raytrain_bert.config.errors import DataError
from raytrain_bert.data.sources import find_source, read_bytes, shown, suffix_of


def fill(folder: Path, *names: str, content: str = "x") -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


def found(folder: Path, *paths: str, format: str = "auto") -> list[str]:
    source = find_source([str(folder / path) for path in paths], format)
    return [os.path.relpath(file, folder) for file in source.files]


def test_relative_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "a.csv")
    monkeypatch.chdir(tmp_path)
    assert find_source(["a.csv"]).files == (str(tmp_path / "a.csv"),)


def test_folder_gives_its_data_files_sorted_and_nothing_else(tmp_path: Path) -> None:
    fill(tmp_path, "b.csv", "a.csv", "deep/c.tsv.gz", "README.md", "LICENSE", ".hidden.csv", "_tmp/d.csv", "plot.png")
    fill(tmp_path, "readme.txt", "notes.txt")
    assert found(tmp_path, ".") == ["a.csv", "b.csv", "deep/c.tsv.gz"]


def test_several_paths_keep_their_order(tmp_path: Path) -> None:
    fill(tmp_path, "b.csv", "a.csv")
    assert found(tmp_path, "b.csv", "a.csv") == ["b.csv", "a.csv"]


def test_the_same_file_twice_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, "a.csv")
    with pytest.raises(DataError, match="more than once"):
        found(tmp_path, "a.csv", "*.csv")


def test_glob_matches_in_one_folder_or_with_two_stars_in_all(tmp_path: Path) -> None:
    fill(tmp_path, "part-1.csv", "part-2.csv", "other.csv", "deep/part-3.csv")
    assert found(tmp_path, "part-*.csv") == ["part-1.csv", "part-2.csv"]
    assert found(tmp_path, "part-[!1].csv") == ["part-2.csv"]
    assert found(tmp_path, "**/part-?.csv") == ["deep/part-3.csv", "part-1.csv", "part-2.csv"]


def test_a_file_whose_name_has_brackets_is_no_glob(tmp_path: Path) -> None:
    fill(tmp_path, "data[1].csv", "data1.csv")
    assert found(tmp_path, "data[1].csv") == ["data[1].csv"]


def test_folder_per_class_takes_labels_from_the_folders(tmp_path: Path) -> None:
    fill(tmp_path, "pos/2.txt", "pos/1.txt", "neg/1.txt", "neg/part/51060", "urls.txt", "README.md")
    source = find_source([str(tmp_path)])
    assert source.kind == "folders"
    pairs = list(zip([os.path.relpath(f, tmp_path) for f in source.files], source.labels or (), strict=True))
    assert pairs == [("neg/1.txt", "neg"), ("neg/part/51060", "neg"), ("pos/1.txt", "pos"), ("pos/2.txt", "pos")]


def test_splits_in_one_folder_are_not_read_together(tmp_path: Path) -> None:
    fill(tmp_path, "files/train.csv", "files/test.csv", "classes/train/pos/1.txt", "classes/test/pos/1.txt")
    for folder in ("files", "classes"):
        with pytest.raises(DataError, match=r"several splits.*--data.test"):
            found(tmp_path, folder)
    assert found(tmp_path, "files/train.csv") == ["files/train.csv"]


def test_files_of_several_kinds_need_the_format(tmp_path: Path) -> None:
    fill(tmp_path, "a.csv", "names.json")
    with pytest.raises(DataError, match=r"several kinds \(delimited, json\)"):
        found(tmp_path, ".")
    assert found(tmp_path, ".", format="csv") == ["a.csv"]


def test_missing_file_names_what_is_near(tmp_path: Path) -> None:
    fill(tmp_path, "reviews.csv", "other.csv")
    with pytest.raises(DataError, match=rf"review.csv: not found. Did you mean {tmp_path}/reviews.csv"):
        found(tmp_path, "review.csv")
    with pytest.raises(DataError, match=r"holds other.csv, reviews.csv"):
        found(tmp_path, "zzzz/deep.parquet")
    with pytest.raises(DataError, match="no file matches"):
        found(tmp_path, "*.jsonl")


def test_empty_folder_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no data files \(.csv"):
        found(tmp_path, ".")


def test_saved_hugging_face_folder_and_hub_name(tmp_path: Path) -> None:
    fill(tmp_path, "dict/dataset_dict.json", "dict/train/state.json", "one/dataset_info.json", "one/state.json")
    assert find_source([str(tmp_path / "dict")]).kind == "saved"
    assert find_source([str(tmp_path / "one")]).kind == "saved"
    assert find_source(["hf:owner/name"]).files == ("owner/name",)
    assert find_source(["owner/name"], "hf").kind == "hub"
    fill(tmp_path, "a.csv")
    with pytest.raises(DataError, match="cannot be mixed"):
        find_source([str(tmp_path / "dict"), str(tmp_path / "a.csv")])


def test_file_uri_is_a_local_path(tmp_path: Path) -> None:
    fill(tmp_path, "with space.csv", content="text")
    source = find_source([f"file://{quote(str(tmp_path))}/with%20space.csv"])
    assert read_bytes(source.files[0]) == b"text"


def test_packed_file_is_unpacked_and_its_extension_is_that_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "a.TSV.gz").write_bytes(gzip.compress(b"hello world"))
    assert suffix_of("a.TSV.gz") == ".tsv"
    assert read_bytes(str(tmp_path / "a.TSV.gz")) == b"hello world"
    assert read_bytes(str(tmp_path / "a.TSV.gz"), 5) == b"hello"
    (tmp_path / "b.csv.gz").write_bytes(b"not packed")
    with pytest.raises(DataError, match=r"b.csv.gz: cannot be read"):
        read_bytes(str(tmp_path / "b.csv.gz"))


def test_file_that_only_other_machines_have(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone.csv: not found on machine .* shared storage"):
        read_bytes(str(tmp_path / "gone.csv"))


class ObjectStore(http.server.BaseHTTPRequestHandler):
    """As much of S3 as listing and reading need."""

    objects: dict[str, bytes]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        bucket, _, key = url.path.lstrip("/").partition("/")
        query = parse_qs(url.query)
        if not key:
            prefix = query.get("prefix", [""])[0]
            keys = sorted(k for k in self.objects if k.startswith(prefix))
            parts = [f"<Contents><Key>{escape(k)}</Key><Size>{len(self.objects[k])}</Size></Contents>" for k in keys]
            head = f"<Name>{bucket}</Name><KeyCount>{len(keys)}</KeyCount><IsTruncated>false</IsTruncated>"
            self.answer(200, f"<ListBucketResult>{head}{''.join(parts)}</ListBucketResult>".encode())
        elif key in self.objects:
            self.answer(200, self.objects[key])
        else:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    def answer(self, status: int, body: bytes) -> None:
        length = len(body)
        if span := self.headers.get("Range"):
            first, _, last = span.removeprefix("bytes=").partition("-")
            body, status = body[int(first) : int(last or length) + 1], 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(body) - 1}/{length}")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def object_store() -> Iterator[str]:
    """Query of URIs that reach a local S3 with some objects in its bucket."""
    objects = {"set/a.csv": b"aa", "set/b.csv.gz": gzip.compress(b"bb"), "set/README.md": b"no", "other/c.csv": b"cc"}
    handler = type("Handler", (ObjectStore,), {"objects": objects})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"?scheme=http&region=us-east-1&endpoint_override=127.0.0.1%3A{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_object_store_is_listed_and_read_like_a_folder(object_store: str) -> None:
    source = find_source([f"s3://key:secret@bucket/set{object_store}"])
    assert [shown(file) for file in source.files] == ["s3://bucket/set/a.csv", "s3://bucket/set/b.csv.gz"]
    assert [read_bytes(file) for file in source.files] == [b"aa", b"bb"]
    by_glob = find_source([f"s3://key:secret@bucket/*/*.csv{object_store}"])
    assert [shown(file) for file in by_glob.files] == ["s3://bucket/other/c.csv", "s3://bucket/set/a.csv"]


def test_secrets_in_a_uri_are_not_shown(object_store: str) -> None:
    with pytest.raises(DataError) as caught:
        find_source([f"s3://key:secret@bucket/set/gone.csv{object_store}"])
    assert "secret" not in str(caught.value)
    assert "s3://bucket/set/gone.csv: not found" in str(caught.value)
