"""How a file is written, found out from its beginning: kind, encoding, delimiter, quoting, header."""

from __future__ import annotations

import codecs
import csv
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from raytrain_bert.config.errors import DataError
from raytrain_bert.config.schema import DataConfig

from . import columns, parse
from .parse import BOMS, NO_DELIMITER, TableFormat
from .sources import suffix_of

SAMPLE_BYTES = 1 << 18
SAMPLE_ROWS = 2000
DELIMITERS = ("\t", ",", ";", "|")
"""Tried in this order: the earlier one wins where two fit equally well."""
RAGGED = 0.7
"""Least share of rows with the usual number of cells. STS benchmark: 0.79; a comma in prose: below 0.5."""
# Encodings of scripts other than Latin that are still met; the detector guesses wildly if it may take any.
OTHER_SCRIPTS = [
    "cp1251", "koi8_r", "cp1250", "cp1253", "cp1255", "cp1256", "shift_jis", "euc_jp", "gb18030", "big5", "euc_kr",
    "cp949", "cp1252",
]  # fmt: skip


MULTIBYTE = ("utf-16", "utf-32", "utf-16-le", "utf-16-be", "shift_jis", "euc_jp", "gb18030", "big5", "euc_kr", "cp949")
"""Encodings in which a sample may end inside a character."""


@dataclass(frozen=True)
class Detected:
    """The format of a file and its first rows."""

    format: TableFormat
    sample: pa.Table


def detect(data: bytes, path: str, settings: DataConfig, whole: bool) -> Detected:
    """Find out how a file that begins with `data` is written; what the settings say is taken as given.

    Args:
        data: the file's beginning.
        path: its name, for its extension and for messages.
        settings: format, encoding, delimiter, quoting, header.
        whole: whether data is all of the file.

    Raises:
        DataError: it is empty or no table.
    """
    if not data.strip():
        raise DataError(f"{path}: the file is empty.")
    encoding = settings.encoding or detect_encoding(data, path, whole)
    if not whole and encoding in ("utf-8", "utf-8-sig"):
        data = _cut_at_line(data)
    text = parse.decode(data, encoding, path) if whole or encoding not in MULTIBYTE else data.decode(encoding, "ignore")
    kind = detect_kind(text, path, settings)
    if kind == "jsonl":
        lines = text if whole else text[: text.rfind("\n") + 1] or text
        objects = itertools.islice(parse.json_lines(lines, path), SAMPLE_ROWS)
        return Detected(TableFormat("jsonl", encoding), parse.objects_to_table(objects, path))
    if kind == "json":
        objects = itertools.islice(parse.json_array(text, path, whole), SAMPLE_ROWS)
        return Detected(TableFormat("json", encoding), parse.objects_to_table(objects, path))
    return _detect_delimited(text, encoding, path, settings, whole)


def _cut_at_line(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1] or data.decode("utf-8", "ignore").encode()


def detect_encoding(data: bytes, path: str, whole: bool = True) -> str:
    """Encoding of a text: by its byte-order mark, utf-8 if it fits, else Western, else guessed by frequency."""
    for mark, name in BOMS:
        if data.startswith(mark):
            return name
    head = data[:4096]
    if head[1::2].count(0) > 0.4 * len(head[1::2]) > 0:
        return "utf-16-le"
    if head[0::2].count(0) > 0.4 * len(head[0::2]) > 0:
        return "utf-16-be"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data, final=whole)
        return "utf-8"
    except UnicodeDecodeError as error:
        if _is_mostly_utf8(data):
            # One damaged line: reading all of it as another encoding would damage every other accent.
            line = data.count(b"\n", 0, error.start) + 1
            raise DataError(
                f"{path}: line {line} is not utf-8 (byte 0x{data[error.start]:02x}) though the rest is. Repair it, "
                "or set --data.encoding."
            ) from None
    letters = sum(byte >= 0x80 or chr(byte).isalpha() for byte in data[: 1 << 16])
    high = sum(byte >= 0x80 for byte in data[: 1 << 16])
    if high >= 10 and high > 0.3 * letters:  # Western text has less than one accent in ten letters
        for name in ("shift_jis", "euc_jp"):  # kana tell Japanese from what the detector takes for Korean
            kana = sum("\u3040" <= c <= "\u30ff" for c in data[: 1 << 16].decode(name, "ignore"))
            if kana > 0.1 * high:
                return name
        import charset_normalizer

        best = charset_normalizer.from_bytes(data[: 1 << 16], cp_isolation=OTHER_SCRIPTS).best()
        if best is not None:
            return best.encoding
    try:
        data.decode("cp1252")
        return "cp1252" if any(0x80 <= byte < 0xA0 for byte in data) else "latin-1"
    except UnicodeDecodeError:
        return "latin-1"


def _is_mostly_utf8(data: bytes) -> bool:
    """Whether valid characters of several bytes outnumber the bytes that fit nowhere, by far."""
    text = data.decode("utf-8", errors="replace")
    bad = text.count("\ufffd")
    good = sum(c > "\x7f" for c in text) - bad
    return good > 10 * bad


def detect_kind(text: str, path: str, settings: DataConfig) -> str:
    """`delimited`, `jsonl` or `json`."""
    if settings.format in ("csv", "tsv"):
        return "delimited"
    if settings.format in ("jsonl", "json"):
        return settings.format
    suffix = suffix_of(path)
    if suffix in (".csv", ".tsv", ".tab"):
        return "delimited"
    if suffix in (".jsonl", ".ndjson"):
        return "jsonl"
    start = text.lstrip("\ufeff \t\r\n")[:200]
    if start[:1] == "[" and (suffix == ".json" or start[1:].lstrip()[:1] == "{"):
        return "json"
    if suffix == ".json" or start.startswith(('{"', '{ "')):
        return "jsonl"
    return "delimited"


def _detect_delimited(text: str, encoding: str, path: str, settings: DataConfig, whole: bool) -> Detected:
    delimiter = {"\\t": "\t", "tab": "\t"}.get(settings.delimiter or "", settings.delimiter)
    if delimiter is None and settings.format == "tsv":
        delimiter = "\t"
    if delimiter is not None and (len(delimiter) != 1 or not delimiter.isascii() or delimiter in '\r\n"'):
        raise DataError(f"--data.delimiter must be one ASCII character, not {settings.delimiter!r}.")
    readings = [
        _read(text, candidate, quoting, whole)
        for candidate in ([delimiter] if delimiter else DELIMITERS)
        for quoting in ((True, False) if settings.quoting is None else (settings.quoting,))
    ]
    best = _best_reading(readings, given=delimiter is not None)
    usual = [row for row in best.rows if len(row) == best.width]
    header = settings.header if settings.header is not None else detect_header(usual)
    names = _column_names(
        best.rows[0] if header else None, max(map(len, best.rows)) if best.delimiter == "\t" else best.width
    )
    format = TableFormat("delimited", encoding, best.delimiter, best.quoting, header, names)
    rows = best.rows[1:] if header else best.rows
    cells = [[row[i] or None if i < len(row) else None for row in rows] for i in range(len(names))]
    return Detected(format, pa.table([pa.array(column, pa.string()) for column in cells], names=list(names)))


@dataclass(frozen=True)
class _Reading:
    """The sample, read with one delimiter, with or without quoting."""

    delimiter: str
    quoting: bool
    rows: list[list[str]]
    clean: bool
    """No quote closes inside a cell or never."""
    width: int
    """The usual number of cells."""
    share: float
    """Share of rows of that width."""


def _read(text: str, delimiter: str, quoting: bool, whole: bool) -> _Reading:
    rows: list[list[str]] = []
    clean = True
    try:
        for row in itertools.islice(parse.delimited_rows(text, delimiter, quoting, strict=True), SAMPLE_ROWS):
            rows.append(row)
    except csv.Error as error:
        # The sample may end inside a quoted cell; the file may not.
        if whole or "unexpected end" not in str(error) or not rows:
            clean = False
            rows = list(itertools.islice(parse.delimited_rows(text, delimiter, quoting), SAMPLE_ROWS))
    widths = Counter(map(len, rows))
    width, count = max(widths.items(), key=lambda item: (item[1], item[0]), default=(0, 0))
    return _Reading(delimiter, quoting, rows, clean, width, count / max(1, len(rows)))


def _best_reading(readings: Sequence[_Reading], given: bool) -> _Reading:
    """The reading with the steadiest columns; one column if there is no delimiter."""
    by_delimiter: dict[str, list[_Reading]] = {}
    for reading in readings:
        by_delimiter.setdefault(reading.delimiter, []).append(reading)
    chosen = [_choose_quoting(pair) for pair in by_delimiter.values()]
    if given:
        return chosen[0]
    tables = [reading for reading in chosen if reading.width > 1 and reading.share >= RAGGED]
    if tables:
        return max(tables, key=lambda reading: (reading.clean, round(reading.share, 2)))
    # No delimiter, no table: each line is one cell, unless quotes say where cells end.
    plain = next((reading for reading in chosen if reading.delimiter == ","), chosen[0])
    if plain.quoting and plain.clean and plain.width == 1 and plain.share == 1:
        return plain
    lines = next((r for r in readings if not r.quoting), readings[0])
    joined = [[lines.delimiter.join(row)] for row in lines.rows]
    return replace(lines, delimiter=NO_DELIMITER, quoting=False, rows=joined, clean=True, width=1, share=1.0)


def _choose_quoting(pair: Sequence[_Reading]) -> _Reading:
    """Whether quotes mean something: they must fit, and between tabulators they must show that they do."""
    if len(pair) == 1:
        return pair[0]
    quoted, plain = sorted(pair, key=lambda reading: not reading.quoting)
    if not quoted.clean:
        return plain if plain.share >= quoted.share and plain.width > 1 else quoted
    if quoted.share < plain.share and plain.width > 1:
        return plain
    if quoted.delimiter != "\t":
        return quoted
    # Programs that write tabulators seldom quote, and one stray quote would swallow the rows after it.
    needed = any("\t" in cell or "\n" in cell for row in quoted.rows for cell in row)
    doubled = any(_is_doubled(cell) for row in plain.rows for cell in row)
    usual = sum(any(len(c) > 1 and c[0] == c[-1] == '"' for c in row) for row in plain.rows) > len(plain.rows) / 2
    return quoted if needed or doubled or usual else plain


def _is_doubled(cell: str) -> bool:
    inner = cell[1:-1]
    return len(cell) > 3 and cell[0] == cell[-1] == '"' and '""' in inner and '"' not in inner.replace('""', "")


def _column_names(header: Sequence[str] | None, width: int) -> tuple[str, ...]:
    """Unique names; a column without one is called by its number, counted from 0."""
    if header is None:
        return tuple(str(i) for i in range(width))
    names: list[str] = []
    for i, cell in enumerate(header):
        name = cell.strip() or str(i)
        again = 2
        while name in names:
            name, again = f"{cell.strip()}_{again}", again + 1
        names.append(name)
    return tuple(names)


def detect_header(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first row names the columns: known names, or cells unlike all below them."""
    first, rest = rows[0] if rows else [], rows[1:]
    if not any(cell.strip() for cell in first):
        return False
    below = [[row[i].strip() for row in rest] for i in range(len(first))]
    cells = [cell.strip() for cell in first]
    named = all(_is_name(cell) or not cell for cell in cells)
    known = sum(columns.is_known_name(cell) and cell not in column for cell, column in zip(cells, below, strict=True))
    if known > 1 or (known and named):  # a label may be called like a column; a sentence beside it may not
        return True
    if len(rest) < 2 or not named:
        return False
    signs = []
    for cell, column in zip(cells, below, strict=True):
        values = [value for value in column if value]
        if not values:
            continue
        if _is_number(cell):
            return False  # no column is called 3
        if all(map(_is_number, values)):
            signs.append(bool(cell))  # a word above numbers
        elif len(set(values)) <= len(values) / 2:  # labels: the first of its kind would come again
            signs.append(cell not in values and _is_name(cell))
            if cell in values:
                return False
    return any(signs)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
        return True
    except ValueError:
        return False


def _is_name(cell: str) -> bool:
    """Whether a cell could be the name of a column: short, few words, no sentence."""
    return 0 < len(cell) <= 40 and len(cell.split()) <= 3 and not cell.endswith((".", "!", "?", ","))
