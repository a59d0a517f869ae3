from __future__ import annotations

import io
from operator import itemgetter

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_bert.config.errors import DataError
from raytrain_bert.data.parse import TableFormat, parse_table, parse_text, to_strings

CSV = TableFormat("delimited", columns=("text", "label"))
BARE_TSV = TableFormat("delimited", delimiter="\t", quoting=False, header=False, columns=("0", "1"))
JSONL, ARRAY, PARQUET = TableFormat("jsonl"), TableFormat("json"), TableFormat("parquet")


def rows(data: str | bytes, format: TableFormat = CSV) -> list[list[str | None]]:
    data = data.encode() if isinstance(data, str) else data
    return [list(row.values()) for row in parse_table(data, format, "file.csv").to_pylist()]


def parquet(table: pa.Table | pd.DataFrame) -> bytes:
    out = io.BytesIO()
    pq.write_table(table if isinstance(table, pa.Table) else pa.Table.from_pandas(table, preserve_index=False), out)
    return out.getvalue()


cells = st.text(st.characters(codec="utf-8", exclude_characters="\r\x00\ufeff"), min_size=1, max_size=12)


# Unique, as a cell that looks like whole rows of the table is refused on purpose.
@given(st.lists(st.tuples(cells, cells), min_size=1, max_size=20, unique_by=(itemgetter(0), itemgetter(1))))
def test_csv_is_read_as_pandas_wrote_it(written: list[tuple[str, str]]) -> None:
    frame = pd.DataFrame(written, columns=["text", "label"])
    text = frame.to_csv(index=False, quoting=1, lineterminator="\n")
    assert rows(text) == [list(pair) for pair in written]


def test_only_an_empty_cell_is_missing() -> None:
    assert rows('text,label\nNA,null\n"",None\nnan,\n') == [["NA", "null"], [None, "None"], ["nan", None]]


def test_everything_is_a_string() -> None:
    assert rows("text,label\n007,1.50\n2024-01-01,True\n") == [["007", "1.50"], ["2024-01-01", "True"]]


def test_line_ends_newlines_in_quotes_and_blank_lines() -> None:
    assert rows('text,label\r\n"two\nlines",a\r\n\r\nb,c\r\n   \r\nd,e') == [
        ["two\nlines", "a"],
        ["b", "c"],
        ["d", "e"],
    ]


def test_byte_order_mark_does_not_stick_to_the_first_name() -> None:
    table = parse_table("\ufefftext,label\na,b\n".encode(), CSV, "f")
    assert table.to_pydict() == {"text": ["a"], "label": ["b"]}


def test_other_encodings_are_read_as_their_text() -> None:
    for encoding in ("cp1252", "utf-16"):
        format = TableFormat("delimited", encoding=encoding, columns=("text", "label"))
        assert rows("text,label\nCafé – 5 €,gut\n".encode(encoding), format) == [["Café – 5 €", "gut"]]


def test_bytes_outside_the_encoding_name_their_line() -> None:
    with pytest.raises(DataError, match=r"file.csv: line 3 is not utf-8 \(byte 0xe9\).*--data.encoding"):
        rows(b"text,label\na,b\ncaf\xe9,c\n")
    with pytest.raises(DataError, match="unknown encoding 'utf-9'"):
        rows(b"text,label\n", TableFormat("delimited", encoding="utf-9", columns=("text", "label")))


def test_short_rows_lack_their_last_cells() -> None:
    assert rows("text,label\na,b\nonly text\nc,d\n") == [["a", "b"], ["only text", None], ["c", "d"]]


def test_cells_without_a_column_are_refused_with_their_row() -> None:
    with pytest.raises(DataError, match=r"file.csv: row 2 has 3 cells, not 2: good, really,pos\. Quote text"):
        rows("text,label\nfine,pos\ngood, really,pos\n")


def test_empty_cells_without_a_column_do_no_harm() -> None:
    assert rows("text,label\na,b,,\n") == [["a", "b"]]


def test_further_columns_between_tabs_do_no_harm_without_header() -> None:
    assert rows("a, b\tx\nc\ty\tsource\tlicence\n", BARE_TSV) == [["a, b", "x"], ["c", "y"]]


def test_quotes_are_ordinary_where_quoting_is_off() -> None:
    assert rows('"never closed\tx\n5" screen\ty\n', BARE_TSV) == [['"never closed', "x"], ['5" screen', "y"]]


def test_a_quote_that_never_closes_is_told() -> None:
    with pytest.raises(DataError, match=r"row 2 opens a quote that never closes.*--no-data.quoting"):
        rows('text,label\na,b\n"c,d\ne,f\n')


@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_rows_swallowed_by_an_open_quote_are_told(delimiter: str) -> None:
    lines = ["text,label", "a,x", '"open,x', "b,y", "c,x", "d,y", 'close",x', "e,y", "f,x", "g,y"]
    format = TableFormat("delimited", delimiter=delimiter, columns=("text", "label"))
    with pytest.raises(DataError, match=r"row 2 holds whole rows in its column 'text'"):
        rows("\n".join(lines).replace(",", delimiter), format)


def test_quoted_text_of_several_lines_is_no_swallowed_row() -> None:
    letter = '"Dear Sir,\nI write, as ever,\nto complain.\nYours, X"'
    assert len(rows("text,label\n" + f"{letter},bad\n" * 5 + "fine,good\n" * 5)) == 10


def test_a_row_longer_than_the_parsers_block() -> None:
    long = "word " * 4_000_000
    assert rows(f"text,label\na,b\n{long},c\n") == [["a", "b"], [long, "c"]]


def test_json_values_keep_what_was_written() -> None:
    data = '{"text": "a", "label": 1}\n\n{"label": 1.50, "text": null}\n{"text": "", "label": true, "more": [1, "é"]}\n'
    assert parse_table(data.encode(), JSONL, "f").to_pydict() == {
        "text": ["a", None, None],
        "label": ["1", "1.50", "true"],
        "more": [None, None, '[1, "é"]'],
    }


def test_json_array_equals_json_lines() -> None:
    objects = ['{"text": "a\\nb", "label": 12345678901234567890}', '{"label": "x"}']
    lines = parse_table("\n".join(objects).encode(), JSONL, "f")
    assert parse_table(f"[{', '.join(objects)}]\n".encode(), ARRAY, "f") == lines
    assert lines["label"].to_pylist() == ["12345678901234567890", "x"]


@pytest.mark.parametrize(
    ("data", "format", "message"),
    [
        ('{"text": "a"}\n{"text": \n', JSONL, "line 2 is not JSON"),
        ('{"text": "a"}\n["b"]\n', JSONL, "line 2 is not a JSON object"),
        ('{\n "train": [["a", "x"]]\n}', JSONL, r"line 1 is not JSON .*\(JSON Lines\) or an array"),
        ('{"train": [["a", "x"]], "val": []}', JSONL, "one JSON object with train, val"),
        ('[{"text": "a"}, {"text"', ARRAY, "row 2 is not JSON"),
        ('[{"text": "a"} {"text": "b"}]', ARRAY, "no comma or ] after row 1"),
        ("[1, 2]", ARRAY, "row 1 is not a JSON object"),
        ('{"a": 1}', ARRAY, "expected a JSON array"),
    ],
)
def test_broken_json_names_the_place(data: str, format: TableFormat, message: str) -> None:
    with pytest.raises(DataError, match=f"f.json: .*{message}"):
        parse_table(data.encode(), format, "f.json")


def test_parquet_of_any_types_becomes_strings() -> None:
    frame = pd.DataFrame(
        {
            "i": [1, 2],
            "gap": [0.0, None],
            "f": [0.5, 1.0],
            "b": [True, False],
            "s": ["x", ""],
            "c": pd.Categorical(["u", "v"]),
            "l": [[1, 2], None],
        }
    )
    assert parse_table(parquet(frame), PARQUET, "f").to_pydict() == {
        "i": ["1", "2"],
        "gap": ["0", None],
        "f": ["0.5", "1"],
        "b": ["true", "false"],
        "s": ["x", None],
        "c": ["u", "v"],
        "l": ["[1, 2]", None],
    }


def test_parquet_of_text_in_unusual_types() -> None:
    for kind in (pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int8(), pa.string())):
        column = pa.chunked_array([pa.array(["é", None], pa.string())])
        column = (
            pa.chunked_array([column.chunk(0).dictionary_encode()])
            if pa.types.is_dictionary(kind)
            else column.cast(kind)
        )
        assert to_strings(column).to_pylist() == ["é", None]


def test_only_the_wanted_columns_are_read() -> None:
    for data, format in (
        (parquet(pd.DataFrame({"text": ["a"], "more": ["b"], "label": ["c"]})), PARQUET),
        (b'{"text": "a", "more": "b", "label": "c"}', JSONL),
        (b"text,more,label\na,b,c\n", TableFormat("delimited", columns=("text", "more", "label"))),
    ):
        assert parse_table(data, format, "f", ["label", "text"]).to_pydict() == {"label": ["c"], "text": ["a"]}
        with pytest.raises(DataError, match=r"f: no column 'stars'; columns are text, more, label"):
            parse_table(data, format, "f", ["text", "stars"])


def test_what_is_no_parquet_is_told() -> None:
    with pytest.raises(DataError, match=r"f.parquet: not readable as Parquet"):
        parse_table(b"PAR1 but no more", PARQUET, "f.parquet")


def test_text_file_is_one_text_whatever_its_encoding() -> None:
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "cp1252"):
        assert parse_text("\n Prices – up £5 \r\n".encode(encoding), "f") == "Prices – up £5"
    assert parse_text(b"a \x81 caf\xe9", "f") == "a \x81 café"
    assert parse_text(b"\xcf\xf0", "f", "cp1251") == "Пр"
