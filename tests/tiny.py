"""Tiny models with random weights and a real fast tokenizer, made in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXT = (
    "the a of and to in is it was good bad great awful fine poor happy sad love hate film book food service place team "
    "game match goal market share bank price vote law party minister phone chip software data music album star award"
)
WORDS = TEXT.split()
VOCABULARY = [
    *SPECIAL,
    *WORDS,
    *"abcdefghijklmnopqrstuvwxyz0123456789.,!?",
    *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz0123456789"),
]

SIZES: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "bert": SIZES | {"max_position_embeddings": 128},
    "distilbert": {"n_layers": 2, "dim": 32, "n_heads": 2, "hidden_dim": 48, "max_position_embeddings": 128},
    "roberta": SIZES | {"max_position_embeddings": 130, "type_vocab_size": 1, "pad_token_id": 0},
    "electra": SIZES | {"embedding_size": 32, "max_position_embeddings": 128},
    "modernbert": SIZES | {"max_position_embeddings": 128, "global_attn_every_n_layers": 2, "local_attention": 16},
    "deberta-v2": SIZES | {"max_position_embeddings": 128, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
}


def tiny_tokenizer(*, token_types: bool = True) -> PreTrainedTokenizerFast:
    """A WordPiece tokenizer over a handful of words, with BERT's template."""
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, VOCABULARY.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    names = ["input_ids", "token_type_ids", "attention_mask"] if token_types else ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_max_length=128, model_input_names=names,
    )  # fmt: skip


def tiny_model(folder: Path, architecture: str = "bert", *, seed: int = 0, **settings: Any) -> Path:
    """Write an encoder with random weights and a tokenizer; gives the folder."""
    config = AutoConfig.for_model(
        architecture, **{"vocab_size": len(VOCABULARY), "pad_token_id": 0, **ARCHITECTURES[architecture], **settings}
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        AutoModel.from_config(config).save_pretrained(folder)
    tiny_tokenizer(token_types=architecture in ("bert", "electra", "deberta-v2")).save_pretrained(folder)
    return folder


def tiny_bert(folder: Path, **settings: Any) -> Path:
    """The usual tiny model."""
    return tiny_model(folder, "bert", **settings)
