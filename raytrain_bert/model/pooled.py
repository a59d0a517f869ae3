"""An encoder, a pooling of its output, and one linear layer.

This file needs only torch and transformers: a copy of it lies in every model folder with such a head, so that the
folder opens where raytrain_bert is not installed (with trust_remote_code=True).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput


def first_token(hidden: Tensor, mask: Tensor) -> Tensor:
    """The first real token ([CLS]): (batch, length, width), (batch, length) -> (batch, width)."""
    return _token_at(hidden, mask.long().argmax(dim=1))


def last_real_token(hidden: Tensor, mask: Tensor) -> Tensor:
    """The last token that is no padding: (batch, length, width), (batch, length) -> (batch, width)."""
    positions = torch.arange(mask.shape[1], device=mask.device)
    return _token_at(hidden, (positions * (mask > 0)).argmax(dim=1))


def masked_mean(hidden: Tensor, mask: Tensor) -> Tensor:
    """Average over real tokens: (batch, length, width), (batch, length) -> (batch, width)."""
    weights = mask.unsqueeze(-1).float()  # summed in float32: bfloat16 loses hundreds of tokens
    mean = (hidden.float() * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)
    return mean.to(hidden.dtype)


def masked_max(hidden: Tensor, mask: Tensor) -> Tensor:
    """Maximum over real tokens: (batch, length, width), (batch, length) -> (batch, width)."""
    padding = mask.unsqueeze(-1) == 0
    return hidden.masked_fill(padding, torch.finfo(hidden.dtype).min).amax(dim=1)


POOLERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": first_token,
    "mean": masked_mean,
    "last": last_real_token,
    "max": masked_max,
}


class PooledConfig(PreTrainedConfig):
    """The encoder's configuration, and the head on top of it."""

    model_type = "raytrain_bert_pooled"
    sub_configs = {"encoder": AutoConfig}  # noqa: RUF012 (transformers' own form)

    encoder: dict[str, Any] | PreTrainedConfig | None = None
    pooling: str = "mean"
    classifier_dropout: float = 0.1

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.encoder, dict):
            self.encoder = AutoConfig.for_model(**self.encoder)
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]
        if self.encoder is not None:
            self.pad_token_id = self.encoder.pad_token_id
            self.hidden_size = self.encoder.hidden_size
            self.num_hidden_layers = self.encoder.num_hidden_layers


class PooledForSequenceClassification(PreTrainedModel):
    """Any encoder with one linear layer over its pooled output; logits (batch, num_labels)."""

    config_class = PooledConfig
    base_model_prefix = "encoder"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: PooledConfig, encoder: PreTrainedModel | None = None) -> None:
        super().__init__(config)
        self.encoder = encoder if encoder is not None else build_encoder(cast(PreTrainedConfig, config.encoder))
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(self.encoder.config.hidden_size, cast(int, config.num_labels))
        self.encoder_arguments = set(inspect.signature(self.encoder.forward).parameters)
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.classifier:
            module.weight.data.normal_(mean=0.0, std=0.02)
            module.bias.data.zero_()

    def get_input_embeddings(self) -> nn.Module:
        """The encoder's."""
        return self.encoder.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Set the encoder's."""
        self.encoder.set_input_embeddings(value)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """(batch, length) ids and mask -> logits (batch, num_labels); the loss too where labels (batch,) are given."""
        if attention_mask is None:
            reference = input_ids if input_ids is not None else kwargs["inputs_embeds"][..., 0]
            attention_mask = torch.ones(reference.shape, dtype=torch.long, device=reference.device)
        if token_type_ids is not None and "token_type_ids" in self.encoder_arguments:
            kwargs["token_type_ids"] = token_type_ids
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        pooled = POOLERS[self.config.pooling](hidden, attention_mask)
        logits = self.classifier(self.dropout(pooled))
        loss = None if labels is None else nn.functional.cross_entropy(logits.float(), labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def build_encoder(config: PreTrainedConfig) -> PreTrainedModel:
    """The encoder of a configuration with random weights, without its own pooling layer if it can do without."""
    try:
        return cast(PreTrainedModel, AutoModel.from_config(config, add_pooling_layer=False))
    except TypeError:
        return cast(PreTrainedModel, AutoModel.from_config(config))


def _token_at(hidden: Tensor, positions: Tensor) -> Tensor:
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), positions]


AutoConfig.register(PooledConfig.model_type, PooledConfig, exist_ok=True)
AutoModelForSequenceClassification.register(PooledConfig, PooledForSequenceClassification, exist_ok=True)
PooledConfig.register_for_auto_class()  # type: ignore[no-untyped-call]
PooledForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")  # type: ignore[no-untyped-call]
