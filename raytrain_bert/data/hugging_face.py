"""Data sets of the Hugging Face `datasets` library: a saved folder, or a name of its hub."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from raytrain_bert.config.errors import DataError
from raytrain_bert.config.schema import DataConfig

from .parse import table_to_strings
from .sources import Source, shown

ROWS_PER_TABLE = 10_000
SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing"),
}


def load_splits(source: Source, settings: DataConfig) -> dict[str, Any]:
    """Splits of a data set by their names.

    Raises:
        DataError: it cannot be loaded.
    """
    import datasets

    name = source.files[0]
    datasets.disable_progress_bars()  # they would break up our own screen
    try:
        data = datasets.load_from_disk(name) if source.kind == "saved" else datasets.load_dataset(name, settings.subset)
    except Exception as error:  # many kinds, from four libraries; none is a fault of this program
        hint = "" if source.kind == "saved" else " Check the name, --data.subset and the network."
        raise DataError(f"{shown(name)}: cannot be loaded as a Hugging Face data set: {error}{hint}") from None
    return dict(data) if isinstance(data, dict) else {str(data.split or "train"): data}


def match_splits(names: Sequence[str], roles: Sequence[str], where: str) -> dict[str, str]:
    """Role -> split that plays it. The first role must be filled; if there is one split only, by that.

    Raises:
        DataError: no split can play the first role.
    """
    found = {}
    for role in roles:
        hits = [name for name in names if name.lower() in SPLIT_NAMES[role]]
        if hits:
            found[role] = hits[0]
    if roles[0] not in found:
        if len(names) != 1:
            raise DataError(f"{where}: no split for {roles[0]}; splits are {', '.join(names)}.")
        found = {roles[0]: names[0]}
    return found


def split_tables(dataset: Any) -> list[pa.Table]:
    """A split as tables of strings; class numbers become class names, -1 (not known) becomes null."""
    class_names = {name: list(f.names) for name, f in dataset.features.items() if getattr(f, "names", None)}
    tables = []
    for table in dataset.with_format("arrow").iter(batch_size=ROWS_PER_TABLE):
        for name, names in class_names.items():
            ids = table[name]
            ids = pc.if_else(pc.less(ids, 0), pa.scalar(None, ids.type), ids)
            table = table.set_column(table.column_names.index(name), name, pc.take(pa.array(names, pa.string()), ids))
        tables.append(table_to_strings(table))
    return tables


def label_names(dataset: Any, column: str) -> tuple[str, ...] | None:
    """Class names of a column in the order of their ids, None where it has none."""
    names = getattr(dataset.features[column], "names", None)
    return tuple(names) if names else None
