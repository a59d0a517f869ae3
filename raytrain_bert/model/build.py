"""From a name to a classifier and its tokenizer, and back to a folder."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from raytrain_bert.config.bundled import find_bundled
from raytrain_bert.config.errors import ModelError
from raytrain_bert.config.schema import ModelConfig

from .layers import freeze
from .pooled import PooledConfig, PooledForSequenceClassification

UNLIMITED = 1_000_000
"""Tokenizers without a limit say so with a huge number."""


def resolve_model(name: str) -> str:
    """What transformers takes: the folder of a bundled or local model, else the hub name."""
    if name.startswith("bundled:"):
        return str(find_bundled(name))
    path = Path(name).expanduser()
    return str(path.resolve()) if path.is_dir() else name


def load_tokenizer(settings: ModelConfig) -> Any:
    """The model's fast tokenizer.

    Raises:
        ModelError: there is none, it is not a fast one, or it cannot pad.
    """
    with _readable_errors(settings.name):
        tokenizer = AutoTokenizer.from_pretrained(
            resolve_model(settings.name), revision=settings.revision, trust_remote_code=settings.trust_remote_code
        )
    if not tokenizer.is_fast:
        raise ModelError(
            f"{settings.name}: its tokenizer ({type(tokenizer).__name__}) has no fast version, which training needs. "
            "Choose a model with a tokenizer.json."
        )
    if tokenizer.pad_token_id is None:
        raise ModelError(
            f"{settings.name}: its tokenizer has no padding token, so texts of unlike length cannot share a batch. "
            "Set pad_token in its tokenizer_config.json, or choose another model."
        )
    return tokenizer


def build_model(settings: ModelConfig, label_names: Sequence[str], *, seed: int) -> PreTrainedModel:
    """A classifier around pretrained weights, in float32 on the CPU.

    Args:
        settings: which model, which head, what is frozen.
        label_names: classes in the order of their ids.
        seed: seed of the new weights; the caller's random state is left alone.

    Raises:
        ModelError: the model cannot be loaded.
        ConfigError: the settings do not fit the model.
    """
    source = resolve_model(settings.name)
    options: dict[str, Any] = {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}
    with _readable_errors(settings.name), _quiet_transformers(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.from_pretrained(source, **options)
        pooling: str = settings.pooling
        if isinstance(config, PooledConfig):  # a folder that an earlier run wrote: its encoder is what goes on
            pooling = config.pooling if pooling == "native" else pooling
        if settings.dropout is not None:
            set_dropout(config, settings.dropout)
        id2label = dict(enumerate(label_names))
        labels: dict[str, Any] = {
            "num_labels": len(label_names),
            "id2label": id2label,
            "label2id": {name: index for index, name in id2label.items()},
        }
        options |= {"dtype": torch.float32, "use_safetensors": True}
        if settings.pooling == "native" or isinstance(config, PooledConfig):
            config.problem_type = "single_label_classification"
            if isinstance(config, PooledConfig):
                config.pooling = pooling
            for key, value in labels.items():
                setattr(config, key, value)
            model: PreTrainedModel
            model, loading = AutoModelForSequenceClassification.from_pretrained(
                source, config=config, ignore_mismatched_sizes=True, output_loading_info=True, **options
            )
            _refuse_random_weights(settings.name, loading, inside=f"{model.base_model_prefix}.")
        else:
            encoder = _load_encoder(settings.name, source, config, options)
            dropout = settings.dropout if settings.dropout is not None else _own_dropout(config)
            # Without the folder it came from: the path of this machine means nothing to whoever gets the model.
            own = {key: value for key, value in encoder.config.to_dict().items() if key != "_name_or_path"}
            head = PooledConfig(
                encoder=own, pooling=pooling, classifier_dropout=dropout,
                problem_type="single_label_classification", **labels,
            )  # fmt: skip
            model = PooledForSequenceClassification(head, encoder)
    _freeze_unused_pooler(model)
    freeze(model, settings)
    if settings.gradient_checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    return model


def load_model(folder: str | Path, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """A classifier out of its folder, native or pooled head, in evaluation mode.

    Raises:
        ModelError: it cannot be loaded, or has no trained head.
    """
    model: PreTrainedModel
    with _readable_errors(str(folder)), _quiet_transformers():
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            folder,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
        )
    _refuse_random_weights(str(folder), loading)
    model.eval()
    return model


def save_model(model: PreTrainedModel, tokenizer: Any, folder: str | Path, *, max_length: int) -> None:
    """Write a plain Hugging Face folder: configuration, weights in safetensors, tokenizer that cuts as in training."""
    with _quiet_transformers():
        model.save_pretrained(folder)
    tokenizer.model_max_length = max_length
    tokenizer.save_pretrained(folder)
    # What a tokenizer.json says of truncation and padding would be applied by others without being asked for.
    path = Path(folder) / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content |= {"truncation": None, "padding": None}
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")


def longest_input(settings: ModelConfig, tokenizer: Any) -> int:
    """Most tokens that the model takes, special ones included; UNLIMITED where it sets no limit."""
    with _readable_errors(settings.name):
        config = AutoConfig.from_pretrained(
            resolve_model(settings.name), revision=settings.revision, trust_remote_code=settings.trust_remote_code
        )
    config = encoder_config(config)
    limits = [UNLIMITED]
    positions = getattr(config, "max_position_embeddings", None)
    if positions and positions > 0:
        # RoBERTa and its kin number positions from the padding id on, so that 514 hold 512 tokens.
        starts_behind_padding = config.model_type in (
            "roberta",
            "xlm-roberta",
            "camembert",
            "mpnet",
            "xlm-roberta-xl",
            "longformer",
        )
        limits.append(positions - (config.pad_token_id + 1 if starts_behind_padding else 0))
    if tokenizer.model_max_length and tokenizer.model_max_length < UNLIMITED:
        limits.append(tokenizer.model_max_length)
    return min(limits)


def accepts_token_types(model: nn.Module, tokenizer: Any) -> bool:
    """Whether the model tells the first text of a pair from the second by token types."""
    config = encoder_config(model.config)
    return "token_type_ids" in tokenizer.model_input_names and (getattr(config, "type_vocab_size", 0) or 0) > 1


def encoder_config(config: Any) -> Any:
    """The encoder's own configuration, inside a pooled one or as it is."""
    return config.encoder if isinstance(config, PooledConfig) else config


def set_dropout(config: Any, dropout: float) -> None:
    """Set every dropout of a configuration, encoder and head; architectures name them in their own ways."""
    if isinstance(config, PooledConfig):
        set_dropout(config.encoder, dropout)
    for name in [*config.to_dict(), "cls_dropout"]:
        value = getattr(config, name, None)
        if "dropout" in name and not isinstance(value, bool) and (value is None or isinstance(value, int | float)):
            setattr(config, name, dropout)


def _own_dropout(config: Any) -> float:
    """Dropout before a new head: the architecture's own for a classifier, else the encoder's."""
    for name in ("classifier_dropout", "seq_classif_dropout", "cls_dropout", "hidden_dropout_prob", "dropout"):
        value = getattr(config, name, None)
        if value is not None:
            return float(value)
    return 0.1


def _load_encoder(name: str, source: str, config: Any, options: dict[str, Any]) -> PreTrainedModel:
    """The bare encoder, without a pooling layer of its own where it can go without."""
    options = options | {"config": config, "ignore_mismatched_sizes": True, "output_loading_info": True}
    encoder: PreTrainedModel
    try:
        encoder, loading = AutoModel.from_pretrained(source, add_pooling_layer=False, **options)
    except TypeError:
        encoder, loading = AutoModel.from_pretrained(source, **options)
    _refuse_random_weights(name, loading, inside="")
    return encoder


def _refuse_random_weights(name: str, loading: dict[str, Any], *, inside: str | None = None) -> None:
    """transformers fills what the file lacks with random numbers: right for a new head, ruin for anything else.

    Args:
        name: the model, for the message.
        loading: what `output_loading_info` gives.
        inside: prefix of the encoder's parameters, its pooler may be new as well; None allows nothing new at all.
    """
    lost = sorted({*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])})
    if inside is not None:
        lost = [key for key in lost if key.startswith(inside) and "pooler" not in key.split(".")]
        remedy = "Give the complete folder of an encoder whose config.json belongs to its model.safetensors."
    else:
        remedy = "Give the folder of a trained classifier, for example RUN/model."
    if lost:
        raise ModelError(
            f"{name}: {len(lost)} weights are missing or have another shape than config.json says "
            f"(first: {lost[0]}). {remedy}"
        )


def _freeze_unused_pooler(model: PreTrainedModel) -> None:
    """A pooling layer that a pooled head goes around gets no gradient; DDP must not wait for one."""
    if isinstance(model, PooledForSequenceClassification):
        for name, parameter in model.encoder.named_parameters():
            if "pooler" in name.split("."):
                parameter.requires_grad_(False)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No load report and no progress bar: a new head is what we asked for."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def _readable_errors(name: str) -> Iterator[None]:
    """Turn what transformers raises about a model that is not there into one sentence."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        text = str(error).strip() or type(error).__name__
        nearby = [p.name for p in Path(name).expanduser().parent.glob("*") if p.is_dir()] if "/" in name else []
        near = difflib.get_close_matches(Path(name).name, nearby, n=1, cutoff=0.6)
        hint = f" Did you mean {Path(name).parent / near[0]}?" if near else ""
        if "trust_remote_code" in text:
            hint = " It brings Python code of its own; if you trust it, set --model.trust-remote-code."
        elif isinstance(error, SafetensorError):
            hint = " Its model.safetensors is damaged; copy or download it again."
        elif "safetensors" in text:
            hint = " Only safetensors weights are read; convert the folder with model.save_pretrained(...)."
        elif not hint:
            hint = " Give a model folder, a hub name (with a connection to the hub), or bundled:all-minilm-l6-v2."
        raise ModelError(f"{name}: cannot be loaded ({text.splitlines()[0]}).{hint}") from error
