from __future__ import annotations

import csv
import io
import random

import pandas as pd
import pytest

from raytrain_bert.config.errors import DataError
from raytrain_bert.config.schema import DataConfig
from raytrain_bert.data.detect import Detected, detect, detect_encoding
from raytrain_bert.data.parse import NO_DELIMITER, TableFormat

RUSSIAN = "Отличный фильм, очень понравился. Скучно и слишком длинно, не советую никому смотреть его. "
JAPANESE = "とても面白い映画でした。もう一度見たいと思います。退屈で長すぎる作品でした。"
CHINESE = "这部电影非常精彩,我还想再看一遍。剧情无聊而且太长了,不推荐大家观看。"


def detect_text(text: str, path: str = "data.csv", **settings: object) -> Detected:
    return detect(text.encode(), path, DataConfig.model_validate(settings), whole=True)


def table(text: str, path: str = "data.csv", **settings: object) -> TableFormat:
    return detect_text(text, path, **settings).format


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "utf-16-le", "utf-16-be", "cp1252"])
def test_encoding_of_western_text(encoding: str) -> None:
    text = "text,label\nDas Café – schön für 5 € und „gut“,pos\n" * 20
    assert text.encode(encoding).decode(detect_encoding(text.encode(encoding), "f")) == text


@pytest.mark.parametrize(
    ("text", "encoding"),
    [(RUSSIAN, "cp1251"), (RUSSIAN, "koi8-r"), (JAPANESE, "shift_jis"), (JAPANESE, "euc_jp"), (CHINESE, "gb18030")],
)
def test_encoding_of_other_scripts(text: str, encoding: str) -> None:
    data = (text * 20).encode(encoding)
    assert data.decode(detect_encoding(data, "f")) == text * 20


def test_latin_1_without_cp1252_characters_is_called_latin_1() -> None:
    assert detect_encoding("café £5".encode("latin-1"), "f") == "latin-1"
    assert detect_encoding(b"a \x81 caf\xe9", "f") == "latin-1"  # 0x81 is no character of cp1252


def test_sample_that_ends_inside_a_character_is_still_utf_8() -> None:
    assert detect_encoding("schön".encode()[:4], "f", whole=False) == "utf-8"
    assert detect_encoding("schön".encode()[:4], "f", whole=True) != "utf-8"


def test_one_damaged_line_is_told_and_does_not_change_the_encoding() -> None:
    data = b"text,label\n" + "schön,gut\n".encode() * 50 + b"sch\xf6n,gut\n"
    with pytest.raises(DataError, match=r"f.csv: line 52 is not utf-8 \(byte 0xf6\)"):
        detect_encoding(data, "f.csv")


@pytest.mark.parametrize("delimiter", [",", "\t", ";", "|"])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
@pytest.mark.parametrize("header", [True, False])
def test_what_the_csv_module_writes_is_read_back(delimiter: str, quoting: int, header: bool) -> None:
    random.seed(0)
    words = ["good", 'so "called"', "a, b", "x; y", "p|q", "line\nbreak", "tab\there", "it's", "fine."]
    rows = [[" ".join(random.choices(words, k=6)), random.choice(["pos", "neg", "mixed"])] for _ in range(60)]
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter, quoting=quoting)  # type: ignore[arg-type]
    writer.writerows([["text", "label"], *rows] if header else rows)
    found = detect_text(out.getvalue(), "file")
    assert (found.format.delimiter, found.format.quoting, found.format.header) == (delimiter, True, header)
    assert found.format.columns == (("text", "label") if header else ("0", "1"))
    assert [list(row.values()) for row in found.sample.to_pylist()] == rows


def test_tabs_in_a_file_called_csv() -> None:
    found = table("genre\tA man, a plan\t4.2\ngenre\tB, c\t3\ngenre\tD\t1\n", "sts.csv")
    assert (found.delimiter, found.quoting) == ("\t", False)


def test_stray_quotes_between_tabs_are_ordinary() -> None:
    text = 'sentence\tlabel\n"unclosed quote he said\t1\nsay "hi"\t0\n"Yes!"\t1\n'
    assert not table(text, "f.tsv").quoting
    assert detect_text(text, "f.tsv").sample["sentence"].to_pylist()[0] == '"unclosed quote he said'


def test_pandas_tsv_keeps_its_quoting() -> None:
    frame = pd.DataFrame({"text": ['he said "no"', "two\nlines", "a\tb", "plain"], "label": list("abab")})
    found = detect_text(frame.to_csv(sep="\t", index=False), "f.tsv")
    assert found.format.quoting
    assert found.sample["text"].to_pylist() == frame["text"].tolist()


def test_sample_that_ends_inside_a_quoted_cell() -> None:
    data = ('text,label\n"a, b",x\n"c, d",y\n' * 5 + '"cut in the mid').encode()
    found = detect(data, "f.csv", DataConfig(), whole=False).format
    assert (found.delimiter, found.quoting) == (",", True)


@pytest.mark.parametrize(
    ("rows", "header"),
    [
        (["review,stars", "Good food,5", "Bad,1"], True),
        (["kommentar,kategorie", "Das war gut,lob", "Schlecht,tadel", "Sehr gut,lob", "Naja,tadel"], True),
        (["Consumer complaint narrative,Product", "They lied,loan", "No reply,card", "No,loan", "So so,card"], True),
        (["beitrag,wert", "Das war gut,1", "Schlecht,0", "Sehr gut,1"], True),
        (["Das war gut,lob", "Schlecht,tadel", "Sehr gut,lob", "Naja,tadel"], False),
        (["what time is it,time", "book a flight,travel"], False),
        (["3,Title,Body of the story", "4,Other,Second body", "3,More,Third body"], False),
        (["A fine film!,9", "A bad film.,1", "So so,5"], False),
        (["a man is here,x", "no dog barks,y"], False),
    ],
)
def test_header(rows: list[str], header: bool) -> None:
    assert table("\n".join(rows)).header is header


def test_settings_win_over_what_is_found() -> None:
    text = "text;label\na,b;x\nc,d;y\n"
    assert table(text, delimiter=",").delimiter == ","
    assert table("a\\b", delimiter="\\t").delimiter == "\t"
    assert table(text, header=False).columns == ("0", "1")
    assert not table(text, quoting=False).quoting
    assert table(text, encoding="cp1252").encoding == "cp1252"
    assert table('{"text": "x"}', "data", format="csv").kind == "delimited"
    with pytest.raises(DataError, match="one ASCII character"):
        table(text, delimiter="ab")


def test_names_repeat_or_are_missing() -> None:
    assert table(",text,label,label,\n0,a b,x,1,\n1,c d,y,2,\n").columns == ("0", "text", "label", "label_2", "4")


def test_lines_without_delimiter_are_one_column() -> None:
    found = table("0 How did serfdom develop ?\n1 What films, of all ?\n2 Who ?\n", "TREC.all")
    assert (found.delimiter, found.columns) == (NO_DELIMITER, ("0",))


@pytest.mark.parametrize(
    ("text", "path", "kind"),
    [
        ('{"text": "a", "label": 1}\n{"text": "b", "label": 2}\n', "a.jsonl", "jsonl"),
        ('{"text": "a", "label": 1}\n{"text": "b", "label": 2}\n', "a.json", "jsonl"),
        ('{"text": "a", "label": 1}\n{"text": "b", "label": 2}\n', "a", "jsonl"),
        ('[\n {"text": "a", "label": 1},\n {"text": "b", "label": 2}]', "a.json", "json"),
        ('[{"text": "a", "label": 1}, {"text": "b", "label": 2}]', "a.txt", "json"),
        ("[a, b]\tx\n[c, d]\ty\n", "a.txt", "delimited"),
    ],
)
def test_kind_goes_by_name_and_content(text: str, path: str, kind: str) -> None:
    found = detect_text(text, path)
    assert found.format.kind == kind
    if kind != "delimited":
        assert found.sample.to_pydict() == {"text": ["a", "b"], "label": ["1", "2"]}


def test_beginning_of_a_json_array_is_enough() -> None:
    data = b'[{"text": "a", "label": "x"}, {"text": "b", "label": "y"}, {"text": "cut'
    found = detect(data, "a.json", DataConfig(), whole=False)
    assert found.sample["text"].to_pylist() == ["a", "b"]


def test_empty_file_is_refused() -> None:
    with pytest.raises(DataError, match=r"data.csv: the file is empty"):
        table(" \n\n")
