"""Tokens are transformers' own, in the smallest type, and the cache gives them back or is made anew."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from raytrain_bert.config.errors import ModelError
from raytrain_bert.data.tokenise import TokeniseBatch, cache_key, read_cache, tokenizer_json, write_cache
from tests.tiny import tiny_tokenizer

TEXTS = ["good film", "", "bad bad awful food and a long sentence of the market share price 12", "ünïcode ☃ music"]
PAIRS = ["great", "album", "", "the bank and the law and the party and the minister"]


def tokenise(max_length: int, pairs: list[str] | None = None, vocab_size: int = 100) -> pa.Table:
    table = pa.table({"text": TEXTS, "text_pair": pa.array(pairs or [None] * len(TEXTS), pa.string())})
    return TokeniseBatch(tokenizer_json(tiny_tokenizer()), max_length, vocab_size)(table)


@pytest.mark.parametrize("max_length", [8, 128])
@pytest.mark.parametrize("pairs", [None, PAIRS])
def test_tokens_are_those_of_transformers(max_length: int, pairs: list[str] | None) -> None:
    got = tokenise(max_length, pairs)
    expected = tiny_tokenizer()(TEXTS, pairs, truncation=True, max_length=max_length)
    assert got["input_ids"].to_pylist() == expected["input_ids"]
    for start, types in zip(got["second_start"].to_pylist(), expected["token_type_ids"], strict=True):
        assert [int(start > 0 and position >= start) for position in range(len(types))] == types


def test_full_length_counts_what_is_cut() -> None:
    expected = [len(ids) for ids in tiny_tokenizer()(TEXTS, truncation=False)["input_ids"]]
    assert tokenise(8)["full_length"].to_pylist() == expected


@pytest.mark.parametrize(("vocab_size", "kind"), [(65_536, pa.uint16()), (65_537, pa.uint32())])
def test_ids_take_the_smallest_type_that_holds_the_vocabulary(vocab_size: int, kind: pa.DataType) -> None:
    assert tokenise(8, vocab_size=vocab_size)["input_ids"].type.value_type == kind


def test_settings_left_in_the_tokenizer_file_do_not_count() -> None:
    tokenizer = tiny_tokenizer()
    plain = tokenizer_json(tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=128)
    assert tokenizer_json(tokenizer) == plain


def test_a_tokenizer_without_a_fast_form_is_refused() -> None:
    with pytest.raises(ModelError, match="no fast tokenizer"):
        tokenizer_json(object())


def test_the_cache_gives_back_what_was_written(tmp_path: Path) -> None:
    tables = [tokenise(8), tokenise(128)]
    write_cache(tmp_path / "key", tables)
    back = read_cache(tmp_path / "key")
    assert back is not None
    assert pa.concat_tables(back).to_pylist() == pa.concat_tables(tables).to_pylist()
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_a_truncated_cache_is_made_anew(tmp_path: Path) -> None:
    write_cache(tmp_path / "key", [tokenise(8)])
    path = tmp_path / "key" / "tokens.arrow"
    path.write_bytes(path.read_bytes()[:200])
    assert read_cache(tmp_path / "key") is None
    assert read_cache(tmp_path / "other") is None


def test_the_key_changes_with_text_tokenizer_and_length() -> None:
    keys = {cache_key(*parts) for parts in [("a", "t", 8), ("b", "t", 8), ("a", "u", 8), ("a", "t", 9)]}
    assert len(keys) == 4
    assert np.unique([len(key) for key in keys]).tolist() == [32]
