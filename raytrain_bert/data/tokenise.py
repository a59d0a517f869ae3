"""Text to token ids, once: with Ray Data over the cluster, kept in a cache on disk."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from raytrain_bert.config.errors import ModelError

if TYPE_CHECKING:
    import ray.data

CACHE_VERSION = "1"
ROWS_PER_BATCH = 1024


def tokenizer_json(tokenizer: Any) -> str:
    """The fast tokenizer as JSON, without truncation and padding; it runs without importing transformers.

    Raises:
        ModelError: the tokenizer has no fast (Rust) form.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(
            f"{type(tokenizer).__name__} has no fast tokenizer (tokenizer.json). Choose a model that has one."
        )
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    return json.dumps(state | {"truncation": None, "padding": None}, ensure_ascii=False, sort_keys=True)


def cache_key(content: str, tokenizer: str, max_length: int) -> str:
    """Name of a token cache: changes with the text, the tokenizer or the length."""
    parts = "\0".join((CACHE_VERSION, content, tokenizer, str(max_length)))
    return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()


class TokeniseBatch:
    """Ray Data callable: (text, text_pair) columns -> input_ids, second_start, full_length."""

    def __init__(self, tokenizer: str, max_length: int, vocab_size: int) -> None:
        self.tokenizer, self.max_length = tokenizer, max_length
        # The smallest unsigned type that holds every id: half or a quarter of int64's memory.
        self.id_type = pa.uint16() if vocab_size <= 1 << 16 else pa.uint32()

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Tokenise one batch."""
        from tokenizers import Tokenizer  # in the Ray worker; transformers would cost it seconds

        tokenizer = Tokenizer.from_str(self.tokenizer)
        tokenizer.enable_truncation(self.max_length, strategy="longest_first")
        texts = [text or "" for text in batch["text"].to_pylist()]
        pairs = batch["text_pair"].to_pylist()
        inputs: list[Any] = [text if pair is None else (text, pair) for text, pair in zip(texts, pairs, strict=True)]
        encodings = tokenizer.encode_batch_fast(inputs)
        special = {pair: tokenizer.num_special_tokens_to_add(pair) for pair in (False, True)}
        lengths = np.fromiter((len(e.ids) for e in encodings), np.int64, len(encodings))
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        values = np.fromiter((i for e in encodings for i in e.ids), np.uint32, int(lengths.sum()))
        return pa.table(
            {
                "input_ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(values).cast(self.id_type)),
                "second_start": pa.array(
                    [e.type_ids.index(1) if 1 in e.type_ids else 0 for e in encodings], pa.int32()
                ),
                "full_length": pa.array(
                    [
                        len(e.ids) + sum(len(o.ids) - special[pair is not None] for o in e.overflowing)
                        for e, pair in zip(encodings, pairs, strict=True)
                    ],
                    pa.int32(),
                ),
            }
        )


def tokenise(dataset: ray.data.Dataset, tokenizer: str, max_length: int, vocab_size: int) -> list[pa.Table]:
    """Tokenise a dataset of text and text_pair over the cluster; tables in the order of the rows."""
    import ray

    tokens = dataset.select_columns(["text", "text_pair"]).map_batches(
        TokeniseBatch(tokenizer, max_length, vocab_size),
        batch_format="pyarrow",
        batch_size=ROWS_PER_BATCH,
    )
    tables: list[pa.Table] = ray.get(tokens.materialize().to_arrow_refs())
    return [table for table in tables if table.num_rows]


def read_cache(folder: Path) -> list[pa.Table] | None:
    """Memory-map the cached tokens, None where there are none."""
    path = folder / "tokens.arrow"
    if not path.is_file():
        return None
    try:
        with pa.memory_map(str(path)) as source:
            return [pa.Table.from_batches([batch]) for batch in pa.ipc.open_file(source).read_all().to_batches()]
    except (pa.ArrowInvalid, OSError):  # half a file from a full disk or another version: make it anew
        return None


def write_cache(folder: Path, tables: Sequence[pa.Table]) -> None:
    """Write tokens under a temporary name, then rename; a disk that is full or read-only only costs the cache."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with (
            pa.OSFile(str(temporary / "tokens.arrow"), "wb") as sink,
            pa.ipc.new_file(sink, tables[0].schema) as writer,
        ):
            for table in tables:
                writer.write_table(table.combine_chunks())
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
