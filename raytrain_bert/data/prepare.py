"""From files to token rows in the object store: read, audit, label space, split, tokenise."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raytrain_bert.config.errors import DataError
from raytrain_bert.config.schema import DataConfig

from . import audit, split
from .labels import LabelSpace, make_label_space
from .read import Rows, read_splits
from .tokenise import cache_key, read_cache, tokenise, tokenizer_json, write_cache

if TYPE_CHECKING:
    import ray.data

Note = Callable[[str], None]


@dataclass(frozen=True)
class PreparedData:
    """Token rows of every split, as the workers take them."""

    dataset: ray.data.Dataset
    """Columns input_ids, second_start, label_id, split, file, row; in the object store."""
    labels: LabelSpace
    label_counts: tuple[int, ...]
    """Training rows of each class, in the order of `labels`."""
    num_rows: dict[str, int]
    """Rows by split name; no key for a split that does not exist."""
    lengths: NDArray[np.int32]
    """Tokens of each row, special ones included, (rows,)."""
    splits: NDArray[np.int8]
    """Split of each row, (rows,)."""
    files: tuple[str, ...]
    """What the column `file` counts."""
    facts: tuple[tuple[str, str], ...]
    """What was found out, for the screen."""
    warnings: tuple[str, ...]
    fingerprint: str
    """Hash of texts, labels and splits: a resumed run must find the same."""


def prepare_data(settings: DataConfig, tokenizer: Any, max_length: int, note: Note = lambda text: None) -> PreparedData:
    """Read, audit, split and tokenise all data of a run; Ray must be up.

    Args:
        settings: where the data is and how it is read.
        tokenizer: a fast Hugging Face tokenizer.
        max_length: longest input in tokens.
        note: told what is being done, for the screen.

    Raises:
        DataError: the data cannot be used; says file and row.
    """
    note("reading the data")
    sources = read_splits(settings)
    rows = {name: _describe(source) for name, source in sources.items()}
    labels = _label_space(settings, sources, rows)
    bad = {name: audit.find_bad_rows(source, labels) for name, source in rows.items()}
    if settings.bad_rows == "error":
        audit.refuse_bad_rows({name: (rows[name], found) for name, found in bad.items()}, labels)
    label_ids = {name: labels.ids(source.labels) for name, source in rows.items()}
    assigned = _assign_splits(settings, rows, label_ids, bad)

    note("tokenising")
    backend = tokenizer_json(tokenizer)
    tables = {
        name: _tokens(settings, sources[name], rows[name], backend, max_length, len(tokenizer)) for name in sources
    }
    files = tuple(file for source in sources.values() for file in source.files)
    joined, first_file = [], 0
    for name, tokens in tables.items():
        joined += _attach(tokens, label_ids[name], assigned[name], rows[name], first_file)
        first_file += len(sources[name].files)
    all_splits = np.concatenate(list(assigned.values()))
    all_tokens = pa.concat_tables(joined)
    lengths = _lengths(all_tokens)
    num_rows = {
        name: int((all_splits == number).sum()) for name, number in split.SPLITS.items() if (all_splits == number).any()
    }
    _check_sizes(num_rows, settings)
    facts, warnings = _facts(sources, rows, labels, label_ids, assigned, bad, num_rows, all_tokens, lengths, max_length)
    return PreparedData(
        dataset=_to_object_store(joined),
        labels=labels,
        label_counts=tuple(
            np.bincount(label_ids["train"][assigned["train"] == split.TRAIN], minlength=len(labels)).tolist()
        ),
        num_rows=num_rows,
        lengths=lengths,
        splits=all_splits,
        files=files,
        facts=facts,
        warnings=warnings,
        fingerprint=_fingerprint(rows, label_ids, assigned, labels, max_length),
    )


def _describe(source: Rows) -> audit.Described:
    import ray

    task = ray.remote(audit.describe_block)
    tables = ray.get([task.remote(block) for block in source.dataset.to_arrow_refs()])
    tables = [table for table in tables if table.num_rows]
    if not tables:
        raise DataError(f"{', '.join(source.files[:3])}: no rows.")
    return audit.described(tables, source.files)


def _label_space(settings: DataConfig, sources: Mapping[str, Rows], rows: Mapping[str, audit.Described]) -> LabelSpace:
    train = rows["train"]
    usable = train.labels.filter(pa.array(~train.empty)).drop_null()
    return make_label_space(usable.unique().to_pylist(), settings.labels or sources["train"].label_names)


def _assign_splits(
    settings: DataConfig,
    rows: Mapping[str, audit.Described],
    label_ids: Mapping[str, NDArray[np.int32]],
    bad: Mapping[str, Mapping[str, NDArray[np.int64]]],
) -> dict[str, NDArray[np.int8]]:
    """Split of every row of every source; bad rows are UNUSED."""
    assigned = {}
    for name, source in rows.items():
        good = np.ones(len(source), dtype=bool)
        for indices in bad[name].values():
            good[indices] = False
        of_source = np.full(len(source), split.UNUSED, dtype=np.int8)
        fractions = {}
        if name == "train":
            if "validation" not in rows:
                fractions[split.VALIDATION] = settings.validation_fraction
            if "test" not in rows and settings.test_fraction:
                fractions[split.TEST] = settings.test_fraction
        if fractions:
            groups = audit.group_duplicates(source.text_ids[good])
            of_source[good] = split.stratified_split(label_ids[name][good], groups, fractions, settings.split_seed)
        else:
            of_source[good] = split.SPLITS[name]
        assigned[name] = of_source
    return assigned


def _tokens(
    settings: DataConfig,
    source: Rows,
    rows: audit.Described,
    tokenizer: str,
    max_length: int,
    vocab_size: int,
) -> list[pa.Table]:
    """Tokens of a source, from the cache where it has them."""
    content = hashlib.blake2b(rows.text_ids.tobytes(), digest_size=16).hexdigest()
    base = Path(settings.cache_dir) if settings.cache_dir else Path.home() / ".cache" / "raytrain_bert"
    folder = base.expanduser() / "tokens" / cache_key(content, tokenizer, max_length)
    if settings.cache and (cached := read_cache(folder)) is not None:
        return cached
    tables = tokenise(source.dataset, tokenizer, max_length, vocab_size)
    if settings.cache:
        with suppress(OSError):  # a read-only or full home costs the next run some seconds, not this one its training
            write_cache(folder, tables)
    return tables


def _attach(
    tokens: list[pa.Table],
    label_ids: NDArray[np.int32],
    assigned: NDArray[np.int8],
    rows: audit.Described,
    first_file: int,
) -> list[pa.Table]:
    """Put label, split and origin beside the tokens, block by block, without copying them."""
    tables, start = [], 0
    for table in tokens:
        part = slice(start, start + table.num_rows)
        start = part.stop
        for name, column in (
            ("label_id", label_ids[part]),
            ("split", assigned[part]),
            ("file", rows.file[part] + np.int32(first_file)),
            ("row", rows.row[part]),
        ):
            table = table.append_column(name, pa.array(column))
        tables.append(table)
    assert start == len(rows), "every row is tokenised once"
    return tables


def _lengths(table: pa.Table) -> NDArray[np.int32]:
    return np.concatenate([np.asarray(chunk.value_lengths()) for chunk in table["input_ids"].chunks]).astype(np.int32)


def _to_object_store(tables: list[pa.Table]) -> ray.data.Dataset:
    import ray
    import ray.data

    columns = ["input_ids", "second_start", "label_id", "split", "file", "row"]
    references: list[Any] = [ray.put(table.select(columns)) for table in tables]
    return ray.data.from_arrow_refs(references)


def _check_sizes(num_rows: Mapping[str, int], settings: DataConfig) -> None:
    for name in ("train", "validation"):
        if not num_rows.get(name):
            raise DataError(
                f"The {name} split has no rows ({sum(num_rows.values())} usable rows in all, validation_fraction "
                f"{settings.validation_fraction}, test_fraction {settings.test_fraction}). Give more data"
                + (" or --data.validation." if name == "validation" else ".")
            )


def _facts(
    sources: Mapping[str, Rows],
    rows: Mapping[str, audit.Described],
    labels: LabelSpace,
    label_ids: Mapping[str, NDArray[np.int32]],
    assigned: Mapping[str, NDArray[np.int8]],
    bad: Mapping[str, Mapping[str, NDArray[np.int64]]],
    num_rows: Mapping[str, int],
    tokens: pa.Table,
    lengths: NDArray[np.int32],
    max_length: int,
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """What the user should see of the data before it is trained on."""
    warnings = []
    facts = list(sources["train"].findings)
    facts.append(("rows", ", ".join(f"{name} {count:,}" for name, count in num_rows.items())))
    train_ids = label_ids["train"][label_ids["train"] >= 0]
    counts = np.bincount(train_ids, minlength=len(labels))
    shown = ", ".join(f"{name} {count:,}" for name, count in list(zip(labels.names, counts, strict=True))[:8])
    facts.append(("labels", f"{len(labels)}: {shown}{', ...' if len(labels) > 8 else ''}"))
    full = np.asarray(tokens["full_length"])
    cut = int((full > max_length).sum())
    facts.append(
        (
            "lengths",
            f"median {int(np.median(full)):,} tokens, longest {int(full.max()):,}; cut at {max_length}: "
            f"{cut:,} rows ({cut / len(full):.0%})",
        )
    )
    groups = audit.group_duplicates(rows["train"].text_ids)
    duplicates = audit.count_duplicates(groups)
    if duplicates:
        facts.append(("duplicates", f"{duplicates:,} rows repeat an earlier text; kept on one side of the split"))
    if conflicts := audit.count_conflicts(groups, label_ids["train"]):
        warnings.append(f"{conflicts:,} texts of the training data carry more than one label.")
    for name in ("validation", "test"):
        if name in rows and (overlap := audit.count_overlap(rows[name].text_ids, rows["train"].text_ids)):
            warnings.append(f"{overlap:,} of {len(rows[name]):,} {name} rows are also in the training data.")
    skipped = sum(len(indices) for found in bad.values() for indices in found.values())
    if skipped:
        reasons = ", ".join(sorted({reason for found in bad.values() for reason in found}))
        warnings.append(f"{skipped:,} rows are left out ({reasons}).")
    in_training = np.bincount(label_ids["train"][assigned["train"] == split.TRAIN], minlength=len(labels))
    if absent := [name for name, count in zip(labels.names, in_training, strict=True) if not count]:
        warnings.append(f"No training row carries the label {', '.join(absent[:5])}.")
    return tuple(facts), tuple(warnings)


def _fingerprint(
    rows: Mapping[str, audit.Described],
    label_ids: Mapping[str, NDArray[np.int32]],
    assigned: Mapping[str, NDArray[np.int8]],
    labels: LabelSpace,
    max_length: int,
) -> str:
    digest = hashlib.blake2b(repr((labels.names, max_length)).encode(), digest_size=16)
    for name in rows:
        for array in (rows[name].text_ids, label_ids[name], assigned[name]):
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
