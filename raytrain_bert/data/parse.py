"""From bytes to a table of strings: pure functions, run where the file is read."""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from raytrain_bert.config.errors import DataError

NO_DELIMITER = "\x1f"
"""Delimiter of a file with one column: a character that no text holds."""
BLOCK_BYTES = 1 << 24
LONGEST_CELL = 1 << 30
BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16: its mark begins with that of UTF-16
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass(frozen=True)
class TableFormat:
    """How a file is read."""

    kind: Literal["delimited", "jsonl", "json", "parquet"]
    encoding: str = "utf-8"
    delimiter: str = ","
    quoting: bool = True
    header: bool = True
    columns: tuple[str, ...] = ()
    """Names of the columns of a delimited file; a column without a name is called by its number."""


def parse_table(data: bytes, format: TableFormat, path: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Every row of a file, all columns strings; missing is null. Only `columns` where given.

    Raises:
        DataError: the content is not what the format says, with file and row.
    """
    if format.kind == "parquet":
        return parse_parquet(data, path, columns)
    if format.kind == "delimited":
        table = parse_delimited(data, format, path)
    else:
        text = decode(data, format.encoding, path)
        objects = json_lines(text, path) if format.kind == "jsonl" else json_array(text, path)
        table = objects_to_table(objects, path)
    return select(table, columns, path)


def select(table: pa.Table, columns: Sequence[str] | None, path: str) -> pa.Table:
    """The named columns of a table."""
    if columns is None:
        return table
    missing = [name for name in columns if name not in table.column_names]
    if missing:
        raise DataError(f"{path}: no column {missing[0]!r}; columns are {', '.join(table.column_names)}.")
    return table.select(list(columns))


def decode(data: bytes, encoding: str, path: str) -> str:
    """Bytes to text, the byte-order mark taken off.

    Raises:
        DataError: a byte does not fit the encoding; says the line.
    """
    try:
        return data.decode("utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding)
    except LookupError:
        raise DataError(f"{path}: unknown encoding {encoding!r}. Set --data.encoding, for example to utf-8.") from None
    except UnicodeError as error:
        start = getattr(error, "start", 0)
        line = data.count(b"\n", 0, start) + 1
        raise DataError(
            f"{path}: line {line} is not {encoding} "
            f"(byte 0x{data[start]:02x}). Repair it, or set --data.encoding, for example to cp1252."
        ) from None


def parse_delimited(data: bytes, format: TableFormat, path: str) -> pa.Table:
    """CSV, TSV and the like. Blank lines are no rows; a short row lacks its last cells."""
    text = decode(data, format.encoding, path)
    names = list(format.columns)
    data = data.removeprefix(codecs.BOM_UTF8) if _is_utf8(format.encoding) else text.encode()
    try:
        table = pyarrow.csv.read_csv(
            pa.BufferReader(data),
            # The header's names may repeat or be empty, so ours are given and its row is skipped.
            read_options=pyarrow.csv.ReadOptions(
                column_names=names, skip_rows_after_names=int(format.header), block_size=BLOCK_BYTES
            ),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter=format.delimiter,
                quote_char='"' if format.quoting else False,
                double_quote=format.quoting,
                escape_char=False,
                newlines_in_values=format.quoting,
            ),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types={name: pa.string() for name in names},
                strings_can_be_null=True,
                quoted_strings_can_be_null=True,
                null_values=[""],
                check_utf8=False,  # decoded above
            ),
        )
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):  # ragged rows, an open quote, an enormous row
        table = _parse_delimited_slowly(text, format, path)
    if format.quoting:
        _refuse_swallowed_rows(table, format, path)
    return table


def _is_utf8(encoding: str) -> bool:
    return codecs.lookup(encoding).name in ("utf-8", "utf-8-sig", "ascii")


def delimited_rows(text: str, delimiter: str, quoting: bool, strict: bool = False) -> Iterator[list[str]]:
    """Rows of a delimited text, blank lines left out.

    Raises:
        csv.Error: where strict, a quote closes inside a cell or never.
    """
    quotes: Any = {"quotechar": '"'} if quoting else {"quoting": csv.QUOTE_NONE, "quotechar": None}
    limit = csv.field_size_limit(LONGEST_CELL)
    try:
        for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=strict, **quotes):
            if len(row) > 1 or (row and row[0].strip()):
                yield row
    finally:
        csv.field_size_limit(limit)


def _parse_delimited_slowly(text: str, format: TableFormat, path: str) -> pa.Table:
    """What the fast parser refuses: fill short rows up, refuse rows whose cells have no column."""
    width = len(format.columns)
    cells: list[list[str | None]] = [[] for _ in range(width)]
    rows = delimited_rows(text, format.delimiter, format.quoting)
    if format.header:
        next(rows, None)
    number, row = 0, [""]
    for number, row in enumerate(rows, 1):
        # A tabulator does not occur in text: further cells are further columns, as in the STS benchmark.
        if len(row) > width and any(row[width:]) and (format.header or format.delimiter != "\t"):
            raise DataError(
                f"{path}: row {number} has {len(row)} cells, not {width}: {_short(format.delimiter.join(row))}. "
                f"Quote text that holds a {describe_delimiter(format.delimiter)}, or set --data.delimiter and "
                "--data.quoting."
            )
        for i in range(width):
            cells[i].append(row[i] or None if i < len(row) else None)
    if format.quoting and '"' in text and _ends_inside_quotes(text, format.delimiter):
        raise DataError(
            f"{path}: row {number} opens a quote that never closes: {_short(format.delimiter.join(row))}. "
            "If quotes are ordinary characters, set --no-data.quoting."
        )
    return pa.table([pa.array(column, pa.string()) for column in cells], names=list(format.columns))


def _ends_inside_quotes(text: str, delimiter: str) -> bool:
    try:
        for _ in delimited_rows(text, delimiter, True, strict=True):
            pass
    except csv.Error as error:
        return "unexpected end" in str(error)
    return False


def _refuse_swallowed_rows(table: pa.Table, format: TableFormat, path: str) -> None:
    """Refuse cells that hold whole rows: an open quote that runs on to the next quote, lines below.

    Sure signs only, as quoted texts of several lines are common: in a table with tabulators a quoted cell
    with a tabulator and a line end; elsewhere a line in a cell that ends like the rows do, with the
    delimiter and a value of the last column (or begins so with one of the first).
    """
    multi = {
        name: pc.indices_nonzero(pc.fill_null(pc.match_substring(table[name], "\n"), False)).to_pylist()
        for name in table.column_names
    }
    if not any(multi.values()):
        return
    edges = []
    for name, is_last in ((table.column_names[0], False), (table.column_names[-1], True)):
        values = pc.value_counts(table[name].drop_null())
        common = {str(v["values"]) for v in values.to_pylist() if v["counts"] > 1}
        if len(common) <= max(2, table.num_rows // 4):
            edges.append((common, is_last))
    for name, indices in multi.items():
        for index in indices:
            lines = table[name][index].as_py().splitlines()
            swallowed = format.delimiter == "\t" and any("\t" in line for line in lines)
            for common, is_last in edges:
                parts = [
                    line.rpartition(format.delimiter) if is_last else line.partition(format.delimiter)
                    for line in lines[1:-1]
                ]
                swallowed = swallowed or any(part[1] and part[2 if is_last else 0] in common for part in parts)
            if swallowed:
                raise DataError(
                    f"{path}: row {index + 1} holds whole rows in its column {name!r}, from an open quote: "
                    f"{_short(' '.join(lines))}. Repair the quote, or set --no-data.quoting if quotes are ordinary "
                    "characters."
                )


def describe_delimiter(delimiter: str) -> str:
    """Name of a delimiter for the screen."""
    names = {",": "comma", "\t": "tabulator", ";": "semicolon", "|": "bar", " ": "space", NO_DELIMITER: "one column"}
    return names.get(delimiter, repr(delimiter))


def _short(text: str, length: int = 80) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 3] + "..."


class _Number(str):
    """A JSON number as it was written."""

    __slots__ = ()


def json_lines(text: str, path: str) -> Iterator[dict[str, Any]]:
    """Objects of JSON Lines, blank lines left out."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                value = json.loads(line, parse_int=_Number, parse_float=_Number)
            except ValueError as error:
                expected = "" if number > 1 else ". Expected an object in each line (JSON Lines) or an array of objects"
                raise DataError(f"{path}: line {number} is not JSON ({error}): {_short(line)}{expected}") from None
            if not isinstance(value, dict):
                raise DataError(f"{path}: line {number} is not a JSON object: {_short(line)}")
            yield value


def json_array(text: str, path: str, whole: bool = True) -> Iterator[dict[str, Any]]:
    """Objects of one JSON array; of the beginning of one where not whole."""
    decoder = json.JSONDecoder(parse_int=_Number, parse_float=_Number)
    space = json.decoder.WHITESPACE  # type: ignore[attr-defined]
    position = space.match(text, 0).end()
    if text[position : position + 1] != "[":
        raise DataError(f"{path}: expected a JSON array of objects, or one object per line (JSON Lines).")
    position, number = space.match(text, position + 1).end(), 0
    while text[position : position + 1] != "]":
        try:
            value, position = decoder.raw_decode(text, position)
        except ValueError as error:
            if not whole:
                return
            raise DataError(f"{path}: row {number + 1} is not JSON ({error}).") from None
        number += 1
        if not isinstance(value, dict):
            raise DataError(f"{path}: row {number} is not a JSON object: {_short(str(value))}")
        yield value
        position = space.match(text, position).end()
        if text[position : position + 1] == ",":
            position = space.match(text, position + 1).end()
        elif text[position : position + 1] != "]":
            if not whole:
                return
            raise DataError(f"{path}: no comma or ] after row {number}.")


def objects_to_table(objects: Iterable[dict[str, Any]], path: str) -> pa.Table:
    """JSON objects -> columns of strings in the order the keys appear; a missing key is null."""
    columns: dict[str, list[str | None]] = {}
    count = 0
    for row in objects:
        for key, value in row.items():
            column = columns.setdefault(key, [])
            column.extend([None] * (count - len(column)))
            column.append(_json_string(value))
        count += 1
    if count == 1 and all(value is None or value[:1] in "[{" for column in columns.values() for value in column):
        raise DataError(
            f"{path}: holds one JSON object with {', '.join(list(columns)[:5])}; expected an array of objects, or one "
            "object per line (JSON Lines)."
        )
    for column in columns.values():
        column.extend([None] * (count - len(column)))
    return pa.table({name: pa.array(column, pa.string()) for name, column in columns.items()})


def _json_string(value: Any) -> str | None:
    """Strings and numbers as written, true and false; lists and objects as JSON."""
    if value is None:
        return None
    if isinstance(value, str):
        return value or None
    return _json_text(value)


def _json_text(value: Any) -> str:
    if isinstance(value, _Number):
        return str(value)
    if isinstance(value, list):
        return f"[{', '.join(_json_text(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k, ensure_ascii=False)}: {_json_text(v)}" for k, v in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def parse_parquet(data: bytes, path: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Parquet, every column as strings."""
    try:
        file = pyarrow.parquet.ParquetFile(pa.BufferReader(data))
        names = [name for name in columns or file.schema_arrow.names if name in file.schema_arrow.names]
        table = file.read(columns=names)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not readable as Parquet: {error}") from None
    if columns is not None and len(names) < len(columns):
        return select(pa.table({name: [] for name in file.schema_arrow.names}), columns, path)  # says what is missing
    return table_to_strings(table)


def table_to_strings(table: pa.Table) -> pa.Table:
    """Every column of a table as strings."""
    return pa.table({name: to_strings(table[name]) for name in table.column_names})


def to_strings(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Any column as strings: integers without a fraction, true and false, lists as JSON; "" and NaN are missing."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if pa.types.is_floating(kind):
        column = pc.if_else(pc.is_nan(column.cast(pa.float64())), None, column)
        whole = pc.all(pc.equal(pc.floor(column.cast(pa.float64())), column.cast(pa.float64()))).as_py()
        # pandas makes integers with gaps floating: 0.0 and 1.0 are the labels 0 and 1.
        if whole and (pc.max(pc.abs(column.cast(pa.float64()))).as_py() or 0) < 2**53:
            column = column.cast(pa.int64())
    if pa.types.is_nested(kind):
        return pa.chunked_array(
            [
                pa.array(
                    [None if v is None else json.dumps(v, ensure_ascii=False, default=str) for v in column.to_pylist()],
                    pa.string(),
                )
            ]
        )
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        try:
            column = column.cast(pa.large_binary()).cast(pa.large_string())
        except pa.ArrowInvalid:  # an image or the like beside the text: a column that nobody can choose
            return pa.chunked_array([pa.nulls(len(column), pa.string())])
    text = column.cast(pa.large_string() if column.nbytes > 1 << 30 else pa.string())
    return pc.if_else(pc.equal(text, ""), pa.scalar(None, text.type), text)


def parse_text(data: bytes, path: str, encoding: str | None = None) -> str:
    """A file that is one text: utf-8, else cp1252, else latin-1; outer whitespace taken off."""
    if encoding:
        return decode(data, encoding, path).strip()
    mark = next((name for bom, name in BOMS if data.startswith(bom)), None)
    for candidate in (mark or "utf-8", "cp1252"):
        try:
            return data.decode(candidate).strip()
        except UnicodeError:
            continue
    return data.decode("latin-1").strip()
