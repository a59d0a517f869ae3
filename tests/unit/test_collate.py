"""Micro batches against the padding of transformers' own tokenizers."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import DataCollatorWithPadding, PreTrainedTokenizerFast

from raytrain_bert.batching.collate import TokenRows, collate

WORDS = [
    "the",
    "a",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dog",
    "and",
    "then",
    "sleeps",
    "sun",
    "all",
    "day",
]
UINT16 = pa.uint16()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: number for number, token in enumerate(SPECIAL + WORDS)}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def make_texts(number: int) -> list[str]:
    rng = np.random.default_rng(number)
    return [" ".join(rng.choice(WORDS, size=rng.integers(1, 30))) for _ in range(number)]


def make_table(encoded: list[dict], labels: list[int], id_type: pa.DataType = UINT16) -> pa.Table:
    return pa.table(
        {
            "input_ids": pa.array([row["input_ids"] for row in encoded], pa.list_(id_type)),
            "second_start": pa.array(
                [row["token_type_ids"].index(1) if 1 in row["token_type_ids"] else 0 for row in encoded], pa.int32()
            ),
            "label_id": pa.array(labels, pa.int32()),
        }
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str], pairs: list[str | None]) -> list[dict]:
    return [dict(tokenizer(text, pair, return_token_type_ids=True)) for text, pair in zip(texts, pairs, strict=True)]


@pytest.mark.parametrize("id_type", [pa.uint16(), pa.uint32()])
@pytest.mark.parametrize("kind", ["single", "pair", "mixed"])
@pytest.mark.parametrize("multiple", [1, 8])
def test_a_micro_batch_equals_that_of_transformers(tokenizer, id_type, kind, multiple):
    texts, others = make_texts(40), make_texts(41)[1:]
    pairs = [None if kind == "single" or (kind == "mixed" and i % 3) else other for i, other in enumerate(others)]
    encoded = encode(tokenizer, texts, pairs)
    labels = np.random.default_rng(5).integers(0, 4, 40).tolist()
    positions = np.random.default_rng(6).permutation(40)[:9]
    batch = collate(
        TokenRows(make_table(encoded, labels, id_type)),
        positions,
        pad_token_id=tokenizer.pad_token_id,
        token_type_ids=True,
        pad_to_multiple_of=multiple,
    )
    collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple)
    expected = collator([encoded[i] | {"label": labels[i]} for i in positions])
    assert set(batch.inputs()) == {"input_ids", "attention_mask", "token_type_ids"}
    for name, tensor in batch.inputs().items():
        assert tensor.dtype == torch.int64
        assert torch.equal(tensor, expected[name]), name
    assert batch.labels.dtype == torch.int64
    assert torch.equal(batch.labels, expected["labels"])
    assert batch.rows.tolist() == positions.tolist()
    assert batch.num_tokens == int(expected["attention_mask"].sum())
    assert batch.num_padded_tokens == expected["input_ids"].numel()


def test_models_without_token_types_get_none(tokenizer):
    encoded = encode(tokenizer, ["the fox", "a dog"], ["a dog sleeps", None])
    batch = collate(TokenRows(make_table(encoded, [0, 1])), np.array([1, 0]), pad_token_id=0, token_type_ids=False)
    assert batch.token_type_ids is None
    assert set(batch.inputs()) == {"input_ids", "attention_mask"}
    assert set(batch.to("cpu").inputs()) == {"input_ids", "attention_mask"}


def test_another_pad_token_fills_the_right_side():
    table = make_table(
        [{"input_ids": [7, 8, 9], "token_type_ids": []}, {"input_ids": [5], "token_type_ids": []}], [0, 1]
    )
    batch = collate(TokenRows(table), np.array([1, 0]), pad_token_id=99, token_type_ids=True)
    assert batch.input_ids.tolist() == [[5, 99, 99], [7, 8, 9]]
    assert batch.attention_mask.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert batch.token_type_ids is not None
    assert batch.token_type_ids.sum() == 0


def make_random_rows(number: int) -> tuple[list[list[int]], pa.Table]:
    rng = np.random.default_rng(1)
    ids = [rng.integers(0, 60_000, rng.integers(1, 20)).tolist() for _ in range(number)]
    table = make_table([{"input_ids": row, "token_type_ids": []} for row in ids], list(range(number)))
    return ids, table


def read(rows: TokenRows) -> list[list[int]]:
    return [tokens.tolist() for tokens in rows.tokens(np.arange(len(rows)))]


@pytest.mark.parametrize("large", [False, True])
def test_chunks_and_slices_give_the_same_rows(large):
    ids, table = make_random_rows(50)
    if large:
        table = table.set_column(0, "input_ids", table["input_ids"].cast(pa.large_list(pa.uint16())))
    # Pieces with their own offsets, an empty one, and one slice of a slice, in another order.
    pieces = [table.slice(30, 20), table.slice(0, 0), table.slice(5, 25).slice(5, 7), table.slice(0, 10)]
    rows = TokenRows(pa.concat_tables(pieces))
    order = [*range(30, 50), *range(10, 17), *range(10)]
    assert len(rows) == len(order)
    assert read(rows) == [ids[i] for i in order]
    assert rows.lengths.tolist() == [len(ids[i]) for i in order]
    assert rows.lengths.dtype == np.int32
    assert rows.label_ids.tolist() == order
    positions = np.array([36, 0, 26, 20])
    batch = collate(rows, positions, pad_token_id=0, token_type_ids=False)
    kept = [line[mask.bool()].tolist() for line, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]
    assert kept == [ids[order[i]] for i in positions]
    assert batch.labels.tolist() == [order[i] for i in positions]


def test_token_values_are_views_into_the_table():
    ids, table = make_random_rows(50)
    rows = TokenRows(pa.concat_tables([table.slice(0, 25), table.slice(25)]))
    values = table["input_ids"].chunk(0).values
    start = values.buffers()[1].address
    for position, tokens in enumerate(rows.tokens(np.arange(50))):
        assert tokens.tolist() == ids[position]
        assert start <= tokens.ctypes.data < start + values.nbytes


def test_an_empty_table_has_no_rows():
    _, table = make_random_rows(3)
    assert len(TokenRows(table.slice(0, 0))) == 0


def test_moving_keeps_everything(tokenizer):
    encoded = encode(tokenizer, ["the fox", "a dog sleeps"], ["a dog", "the sun"])
    batch = collate(TokenRows(make_table(encoded, [1, 0])), np.array([0, 1]), pad_token_id=0, token_type_ids=True)
    moved = batch.to(torch.device("meta"))
    tensors = [*moved.inputs().values(), moved.labels]
    assert [tensor.device.type for tensor in tensors] == ["meta"] * 4
    assert (moved.num_tokens, moved.num_padded_tokens) == (batch.num_tokens, batch.num_padded_tokens)
    same = batch.to("cpu")
    assert torch.equal(same.input_ids, batch.input_ids)
    assert torch.equal(same.labels, batch.labels)
