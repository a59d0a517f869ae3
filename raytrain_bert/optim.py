"""AdamW in parameter groups, and its schedule in optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from raytrain_bert.config.schema import OptimConfig

FUSED_DEVICES = ("cpu", "cuda")


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], depths: Mapping[str, int], settings: OptimConfig
) -> list[dict[str, Any]]:
    """Group the trained parameters by learning rate and weight decay.

    Args:
        named_parameters: of the unwrapped model; frozen ones are left out.
        depths: depth of each by name, the head the deepest; frozen ones included.
        settings: learning rates, layer decay, weight decay.

    Vectors (biases and norm weights) do not decay. Each step down from the head multiplies the learning rate by
    `layer_decay` (discriminative fine-tuning, Howard and Ruder 2018).
    """
    top = max(depths.values())
    head = head_names(depths)
    groups: dict[tuple[int, bool, bool], dict[str, Any]] = {}
    for name, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        key = (depths[name], name in head, parameter.ndim > 1)
        rate = settings.learning_rate * settings.layer_decay ** (top - depths[name])
        if name in head and settings.head_learning_rate is not None:
            rate = settings.head_learning_rate
        group = groups.setdefault(
            key,
            {
                "params": [],
                "lr": rate,
                "weight_decay": settings.weight_decay if key[2] else 0.0,
                "is_head": key[1],
                "depth_below_top": top - depths[name],
            },
        )
        group["params"].append(parameter)
    return [groups[key] for key in sorted(groups, reverse=True)]


def head_names(depths: Mapping[str, int]) -> set[str]:
    """Names of the new head: as deep as anything, and beside the encoder rather than inside it.

    A pretrained pooler (bert.pooler) or final norm (model.final_norm) is as deep, but shares the encoder's prefix.
    """
    top = max(depths.values())
    encoder_prefixes = {name.partition(".")[0] for name, depth in depths.items() if depth < top}
    return {name for name, depth in depths.items() if depth == top and name.partition(".")[0] not in encoder_prefixes}


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], depths: Mapping[str, int], settings: OptimConfig
) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019), fused where the device has it; the first group is the head's."""
    groups = parameter_groups(named_parameters, depths, settings)
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    return torch.optim.AdamW(
        groups,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=devices <= set(FUSED_DEVICES),
    )


def settings_in(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The settings of section optim, by dotted key, that a live optimizer with its schedule works with.

    Peak learning rates are read from the parameter groups, and layer_decay is what lies between them.
    """
    groups = optimizer.param_groups
    rates = {group["depth_below_top"]: group["initial_lr"] for group in groups if not group["is_head"]}
    head = [group["initial_lr"] for group in groups if group["is_head"]]
    found: dict[str, float] = {
        "optim.weight_decay": max(group["weight_decay"] for group in groups),
        "optim.beta1": groups[0]["betas"][0],
        "optim.beta2": groups[0]["betas"][1],
        "optim.epsilon": groups[0]["eps"],
    }
    if head:
        found["optim.head_learning_rate"] = head[0]
    if not rates:  # nothing but the head is trained
        return found | {"optim.learning_rate": head[0]}
    nearest, farthest = min(rates), max(rates)
    decay = 1.0
    if farthest > nearest and rates[nearest] > 0:
        decay = (rates[farthest] / rates[nearest]) ** (1 / (farthest - nearest))
        found["optim.layer_decay"] = decay
    return found | {"optim.learning_rate": rates[nearest] / decay**nearest}


def warmup_steps(settings: OptimConfig, total_steps: int) -> int:
    """Optimizer steps of warmup."""
    return round(settings.warmup_fraction * total_steps)


def learning_rate_factor(settings: OptimConfig, total_steps: int, step: int) -> float:
    """Factor on the peak learning rate in step `step`, counted from 0.

    The first step already moves (factor 1 / warmup steps) and the last one still does; zero would come right after.
    """
    warmup = warmup_steps(settings, total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if settings.schedule == "constant":
        return 1.0
    done = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
    return 1.0 - done if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


def build_schedule(optimizer: torch.optim.Optimizer, settings: OptimConfig, total_steps: int) -> LambdaLR:
    """The schedule over all steps of the run; call `step` once after each optimizer step."""
    return LambdaLR(optimizer, lambda step: learning_rate_factor(settings, total_steps, step))
