"""The rows of every split, read on the cluster with Ray Data."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet

from raytrain_bert.config.errors import DataError, UserError
from raytrain_bert.config.schema import DataConfig

from . import hugging_face, parse
from .columns import Columns, choose_columns
from .detect import SAMPLE_BYTES, SAMPLE_ROWS, Detected, detect, detect_encoding
from .parse import TableFormat
from .sources import Source, find_source, locate, read_bytes, shown, suffix_of

if TYPE_CHECKING:
    import ray.data

DETECTED_FILES = 64
"""Files of a split that are looked into one by one; the others are read like the first with their extension."""
ENCODING_BYTES = 1 << 22
TEXTS_PER_BLOCK = 256
TASKS_PER_CPU = 4
# Small blocks, so that a single file is tokenised on every CPU (Ray's own 128 MiB hold a million sentences).
BLOCK_BYTES = 1 << 22
ROLES = ("train", "validation", "test")
SCHEMA = pa.schema(
    [
        ("text", pa.string()),
        ("text_pair", pa.string()),
        ("label", pa.string()),
        ("file", pa.int32()),
        ("row", pa.int64()),
    ]
)


@dataclass(frozen=True)
class Rows:
    """The rows of one split, as they are in the files."""

    dataset: ray.data.Dataset
    """Materialised; columns text, text_pair (null: no pair), label (null: missing), file, row (from 1)."""
    files: tuple[str, ...]
    """What the column `file` counts."""
    findings: tuple[tuple[str, str], ...]
    """What was found out, for the screen."""
    label_names: tuple[str, ...] | None = None
    """Labels in the order of their ids, where the data set has one."""


def read_splits(settings: DataConfig) -> dict[str, Rows]:
    """Read train, and validation and test where they are given or come with the training data.

    Ray must be up.

    Raises:
        DataError: something is missing or cannot be read; says file, row and what to set.
    """
    with _quiet_ray_data():
        train_source = find_source(settings.train, settings.format)
        if train_source.kind in ("saved", "hub"):
            rows, columns = _read_hugging_face(train_source, settings, ROLES, None)
        else:
            of_train, columns = _read_files(train_source, settings, None)
            rows = {"train": of_train}
        for name, paths in (("validation", settings.validation), ("test", settings.test)):
            if paths is None:
                continue
            source = find_source(paths, settings.format)
            if source.kind in ("saved", "hub"):
                rows |= _read_hugging_face(source, settings, (name,), columns)[0]
            else:
                rows[name] = _read_files(source, settings, columns)[0]
        return {name: rows[name] for name in ROLES if name in rows}


def _read_files(source: Source, settings: DataConfig, train: Columns | None) -> tuple[Rows, Columns | None]:
    """Rows of a split and the columns they come from."""
    files = tuple(map(shown, source.files))
    if source.kind == "folders":
        assert source.labels is not None
        tasks = [
            {"file": i, "path": path, "label": label}
            for i, (path, label) in enumerate(zip(source.files, source.labels, strict=True))
        ]
        dataset = _run(tasks, -(-len(tasks) // TEXTS_PER_BLOCK), _TextReader(settings.encoding))
        found = [
            ("format", f"folder per class, {_count(len(files), 'file')}"),
            ("text", "each file"),
            ("label", f"folder ({', '.join(list(dict.fromkeys(source.labels))[:8])})"),
        ]
        return Rows(dataset, files, tuple(found)), None
    detected = _detect_all(source.files, settings)
    first = detected[source.files[0]]
    columns = choose_columns(first.sample, _as_in_training(settings, train), files[0])
    formats = list(dict.fromkeys(found.format for found in detected.values()))
    by_suffix = {suffix_of(path): found.format for path, found in reversed(detected.items())}
    tasks = []
    for i, path in enumerate(source.files):
        format = detected[path].format if path in detected else by_suffix.get(suffix_of(path), first.format)
        tasks.append({"file": i, "path": path, "format": formats.index(format), "sampled": path in detected})
    dataset = _run(tasks, _num_tasks(len(tasks)), _TableReader(formats, columns, settings.encoding))
    return Rows(dataset, files, _findings(formats, columns, first.sample, len(files))), columns


def _num_tasks(num_files: int) -> int:
    """One file a task, but no more tasks than keep all CPUs busy: each costs some 50 ms."""
    import ray

    cluster: dict[str, float] = ray.cluster_resources()
    return min(num_files, TASKS_PER_CPU * max(1, int(cluster.get("CPU", 1))))


def _as_in_training(settings: DataConfig, train: Columns | None) -> DataConfig:
    if train is None:
        return settings
    return settings.model_copy(
        update={"text_column": train.text, "text_pair_column": train.text_pair, "label_column": train.label}
    )


def _detect_all(paths: Sequence[str], settings: DataConfig) -> dict[str, Detected]:
    looked_into = list(paths[:DETECTED_FILES])
    seen = {suffix_of(path) for path in looked_into}
    for path in paths[DETECTED_FILES:]:
        if suffix_of(path) not in seen:
            seen.add(suffix_of(path))
            looked_into.append(path)
    with ThreadPoolExecutor(8) as pool:  # remote files: waiting, not computing
        found = pool.map(lambda path: detect_file(path, settings), looked_into)
        return dict(zip(looked_into, found, strict=True))


def detect_file(path: str, settings: DataConfig) -> Detected:
    """Format and first rows of a file.

    Raises:
        DataError: it cannot be read, is empty or no table.
    """
    data = read_bytes(path, ENCODING_BYTES)
    if data.startswith(b"PAR1") or settings.format == "parquet":
        return Detected(TableFormat("parquet"), _parquet_sample(path))
    whole = len(data) < ENCODING_BYTES
    if settings.encoding is None:  # from more than the rest needs: accents can be rare
        settings = settings.model_copy(update={"encoding": detect_encoding(data, shown(path), whole)})
    return detect(data[:SAMPLE_BYTES], shown(path), settings, whole and len(data) <= SAMPLE_BYTES)


def _parquet_sample(path: str) -> pa.Table:
    """First rows, without reading all of a big file."""
    file_system, inner, _ = locate(path)
    try:
        packed = suffix_of(path) != os.path.splitext(inner)[1].lower()
        source = pa.BufferReader(read_bytes(path)) if packed else file_system.open_input_file(inner)
        with pyarrow.parquet.ParquetFile(source) as file:
            batches = file.iter_batches(batch_size=SAMPLE_ROWS)
            first = next(batches, None)
            table = pa.Table.from_batches([first] if first is not None else [], file.schema_arrow)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{shown(path)}: not readable as Parquet: {error}") from None
    return parse.table_to_strings(table)


def _findings(
    formats: Sequence[TableFormat], columns: Columns, sample: pa.Table, num_files: int
) -> tuple[tuple[str, str], ...]:
    described = list(dict.fromkeys(map(describe_format, formats)))
    files = f"{_count(num_files, 'file')}: " if num_files > 1 else ""
    shown_formats = "; ".join(described[:3]) + ("; ..." if len(described) > 3 else "")
    return (("format", files + shown_formats), *_column_findings(columns, sample))


def _column_findings(columns: Columns, sample: pa.Table) -> tuple[tuple[str, str], ...]:
    found = []
    for name, column in (("text", columns.text), ("text pair", columns.text_pair), ("label", columns.label)):
        if column is not None:
            unnamed = column == str(sample.column_names.index(column))
            found.append((name, f"column {column} (from 0)" if unnamed else column))
    return tuple(found)


def describe_format(format: TableFormat) -> str:
    """A format in words: CSV, utf-8, comma, header."""
    if format.kind != "delimited":
        name = {"jsonl": "JSON Lines", "json": "JSON array", "parquet": "Parquet"}[format.kind]
        return name if format.kind == "parquet" else f"{name}, {format.encoding}"
    name = {",": "CSV", "\t": "TSV"}.get(format.delimiter, "text table")
    parts = [name, format.encoding, parse.describe_delimiter(format.delimiter)]
    parts.append("header" if format.header else "no header")
    if not format.quoting:
        parts.append("quotes are ordinary")
    return ", ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class _TextReader:
    """Ray Data callable: files of one text each -> their rows."""

    def __init__(self, encoding: str | None) -> None:
        self.encoding = encoding

    def __call__(self, batch: pa.Table) -> pa.Table:
        paths = batch["path"].to_pylist()
        with _carried():
            texts = [parse.parse_text(read_bytes(path), shown(path), self.encoding) or None for path in paths]
        ones = pa.array([1] * len(paths), pa.int64())
        return _as_rows(texts, None, batch["label"], batch["file"], ones)


class _TableReader:
    """Ray Data callable: files of many rows each -> their rows."""

    def __init__(self, formats: Sequence[TableFormat], columns: Columns, encoding: str | None) -> None:
        self.formats, self.columns, self.encoding = list(formats), columns, encoding

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        with _carried():
            for file in batch.to_pylist():
                yield self._read(**file)

    def _read(self, file: int, path: str, format: int, sampled: bool) -> pa.Table:
        data, how = read_bytes(path), self.formats[format]
        if not sampled:
            how = _fit(how, data, shown(path), self.encoding)
        return _rows(parse.parse_table(data, how, shown(path), self.columns.used), self.columns, file, first_row=1)


def _fit(format: TableFormat, data: bytes, path: str, encoding: str | None) -> TableFormat:
    """Format of a file that was not looked into: like the others, with its own encoding and order of columns."""
    if format.kind == "parquet" or not data.strip():
        return format
    settings = DataConfig(
        encoding=encoding or detect_encoding(data, path),
        delimiter=format.delimiter if format.kind == "delimited" else None,
        quoting=format.quoting,
        header=format.header,
        format={"delimited": "csv", "jsonl": "jsonl", "json": "json"}[format.kind],
    )
    return detect(data[:SAMPLE_BYTES], path, settings, whole=len(data) <= SAMPLE_BYTES).format


def _rows(table: pa.Table, columns: Columns, file: int, first_row: int) -> pa.Table:
    row = pa.array(range(first_row, first_row + len(table)), pa.int64())
    pair = None if columns.text_pair is None else table[columns.text_pair]
    return _as_rows(table[columns.text], pair, table[columns.label], pa.array([file] * len(table), pa.int32()), row)


def _as_rows(text: Any, pair: Any, label: Any, file: Any, row: Any) -> pa.Table:
    pair = pa.nulls(len(row), pa.string()) if pair is None else pair
    return pa.table({"text": text, "text_pair": pair, "label": label, "file": file, "row": row}).cast(SCHEMA)


def _run(tasks: Sequence[Mapping[str, Any]], num_blocks: int, reader: _TextReader | _TableReader) -> ray.data.Dataset:
    """Read files on the cluster, in order."""
    import ray.data

    # from_items and not from_arrow, which asks a worker for the size of each block.
    paths = ray.data.from_items([dict(task) for task in tasks], override_num_blocks=num_blocks)
    dataset = paths.map_batches(reader, batch_format="pyarrow", batch_size=None)
    try:
        rows: ray.data.Dataset = dataset.materialize()
        return rows
    except Exception as error:
        found = _user_error(error)
        if found is None:
            raise
        raise found from None


class _ReaderError(Exception):
    """Carries an error of ours through Ray Data, which writes its own advice into messages."""


@contextlib.contextmanager
def _carried() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise _ReaderError(error) from None


def _user_error(error: BaseException | None) -> UserError | None:
    """The error of ours inside Ray's, so that the user sees it without Ray's traceback."""
    while error is not None:
        for carrier in (error, getattr(error, "cause", None)):
            if isinstance(carrier, _ReaderError) and carrier.args and isinstance(carrier.args[0], UserError):
                return carrier.args[0]
        error = error.__cause__
    return None


@contextlib.contextmanager
def _quiet_ray_data() -> Iterator[None]:
    """No progress bars and logs; rows in order; small blocks."""
    from ray.data import DataContext

    context = DataContext.get_current()
    logger = logging.getLogger("ray.data")
    before = (
        context.enable_progress_bars,
        context.execution_options.preserve_order,
        context.target_max_block_size,
        context.raise_original_map_exception,
        logger.level,
    )
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    context.target_max_block_size = BLOCK_BYTES
    context.raise_original_map_exception = True  # else all that is left of ours is a part of a traceback
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        (
            context.enable_progress_bars,
            context.execution_options.preserve_order,
            context.target_max_block_size,
            context.raise_original_map_exception,
            level,
        ) = before
        logger.setLevel(level)


def _read_hugging_face(
    source: Source, settings: DataConfig, roles: Sequence[str], train: Columns | None
) -> tuple[dict[str, Rows], Columns | None]:
    """The splits that play these roles; only the first one must be there."""
    name = shown(source.files[0])
    splits = hugging_face.load_splits(source, settings)
    rows: dict[str, Rows] = {}
    columns = train
    for role, split in hugging_face.match_splits(list(splits), roles, name).items():
        where = f"{name}[{split}]"
        tables = hugging_face.split_tables(splits[split])
        if not tables:
            raise DataError(f"{where}: no rows.")
        chosen = choose_columns(tables[0].slice(0, SAMPLE_ROWS), _as_in_training(settings, columns), where)
        columns = columns or chosen
        # Public test splits often come without their labels (-1): they can test nothing.
        if role == "test" and len(roles) > 1 and all(t[chosen.label].null_count == len(t) for t in tables):
            continue
        found = (("format", f"Hugging Face data set, splits {', '.join(splits)}"), *_column_findings(chosen, tables[0]))
        names = hugging_face.label_names(splits[split], chosen.label)
        rows[role] = Rows(_store(tables, chosen), (where,), found, names)
    return rows, columns


def _store(tables: Sequence[pa.Table], columns: Columns) -> ray.data.Dataset:
    """Tables of one file -> rows in the object store."""
    import ray.data

    blocks, row = [], 1
    for table in tables:
        blocks.append(_rows(table, columns, 0, row))
        row += len(table)
    dataset: ray.data.Dataset = ray.data.from_arrow(blocks).materialize()
    return dataset
