"""The layers of any encoder: where they are, how deep a parameter lies, and which are frozen."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from raytrain_bert.config.errors import ConfigError, ModelError
from raytrain_bert.config.schema import ModelConfig


def encoder_of(model: nn.Module) -> nn.Module:
    """The encoder inside a classifier; transformers names it by `base_model_prefix`."""
    prefix = getattr(model, "base_model_prefix", "")
    encoder = getattr(model, prefix, None) if prefix else None
    return encoder if isinstance(encoder, nn.Module) else model


def encoder_layers(model: nn.Module) -> nn.ModuleList:
    """The list of encoder layers: the first one whose length is the configuration's num_hidden_layers.

    Raises:
        ModelError: the model has no list of layers at all.
    """
    depth = cast(Any, model).config.num_hidden_layers
    lists = [module for module in encoder_of(model).modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ModelError(f"{type(model).__name__} has no list of layers. Choose an encoder such as BERT or ModernBERT.")
    # ALBERT runs one layer many times over, so no list is as long as the configuration says.
    return next((layers for layers in lists if len(layers) == depth), lists[0])


def parameter_depth(model: nn.Module) -> dict[str, int]:
    """Depth of each parameter by name: 0 embeddings, 1 to L the layers, L + 1 the head and all that follows them.

    What the encoder shares between layers (relative position embeddings) counts to the embeddings.
    """
    layers = encoder_layers(model)
    depth = {id(p): index for index, layer in enumerate(layers, start=1) for p in layer.parameters()}
    in_encoder = {id(p) for p in encoder_of(model).parameters()}
    top = len(layers) + 1
    of_embeddings = {id(p) for p in _before_the_layers(model)}
    return {
        name: depth.get(id(p), 0 if id(p) in in_encoder and id(p) in of_embeddings else top)
        for name, p in model.named_parameters()
    }


def freeze(model: nn.Module, settings: ModelConfig) -> None:
    """Take the gradient from the encoder, or from its embeddings and first layers.

    Raises:
        ConfigError: more layers than there are.
    """
    if settings.freeze_encoder:
        encoder_of(model).requires_grad_(False)
    elif settings.freeze_layers:
        layers = encoder_layers(model)
        if settings.freeze_layers > len(layers):
            raise ConfigError(
                f"model.freeze_layers {settings.freeze_layers}: {settings.name} has {len(layers)} layers. "
                "Use --model.freeze-encoder to train only the head."
            )
        depth = parameter_depth(model)
        for name, parameter in model.named_parameters():
            if depth[name] <= settings.freeze_layers:
                parameter.requires_grad_(False)


def _before_the_layers(model: nn.Module) -> list[nn.Parameter]:
    """Parameters of the encoder that are neither in a layer nor in a pooler or a final norm."""
    encoder = encoder_of(model)
    after = ("pooler", "final_norm")
    found = []
    for name, parameter in encoder.named_parameters():
        if not any(part in after for part in name.split(".")):
            found.append(parameter)
    return found
