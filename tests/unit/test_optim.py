"""Parameter groups by hand-computed values, AdamW and the schedule against torch and transformers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from raytrain_bert.config.schema import ModelConfig, OptimConfig
from raytrain_bert.model.build import build_model
from raytrain_bert.model.layers import parameter_depth
from raytrain_bert.optim import build_optimizer, build_schedule, learning_rate_factor, parameter_groups
from tests.tiny import tiny_model


@pytest.fixture(scope="module", params=["bert", "distilbert"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    folder = tiny_model(tmp_path_factory.mktemp("model"), request.param)
    return build_model(ModelConfig(name=str(folder)), ("a", "b"), seed=0)


def rates(model: nn.Module, settings: OptimConfig) -> dict[str, tuple[float, float]]:
    """Learning rate and weight decay of each parameter by name."""
    groups = parameter_groups(model.named_parameters(), parameter_depth(model), settings)
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}


def test_every_trained_parameter_is_in_one_group(model: nn.Module) -> None:
    groups = parameter_groups(model.named_parameters(), parameter_depth(model), OptimConfig())
    listed = [id(p) for group in groups for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in model.parameters())


def test_biases_and_norms_do_not_decay(model: nn.Module) -> None:
    for name, (_, decay) in rates(model, OptimConfig(weight_decay=0.3)).items():
        expected = 0.0 if name.endswith("bias") or "layernorm" in name.lower() or "layer_norm" in name else 0.3
        assert decay == expected, name


def test_layer_decay_by_hand(model: nn.Module) -> None:
    for name, (rate, _) in rates(model, OptimConfig(learning_rate=1.0, layer_decay=0.5)).items():
        if "embeddings" in name:
            expected = 0.125
        elif "layer.0." in name:
            expected = 0.25
        elif "layer.1." in name:
            expected = 0.5
        else:
            expected = 1.0
        assert rate == expected, name


def test_the_head_may_have_a_learning_rate_of_its_own(model: nn.Module) -> None:
    got = rates(model, OptimConfig(learning_rate=1.0, head_learning_rate=7.0))
    assert got["classifier.weight"][0] == 7.0
    assert {rate for name, (rate, _) in got.items() if "layer." in name} == {1.0}


@pytest.mark.parametrize(
    ("architecture", "head"),
    [
        ("bert", {"classifier"}),  # bert.pooler is pretrained
        ("distilbert", {"pre_classifier", "classifier"}),
        ("roberta", {"classifier"}),
        ("modernbert", {"head", "classifier"}),  # model.final_norm is pretrained
        ("deberta-v2", {"pooler", "classifier"}),  # its pooler is new
    ],
)
@pytest.mark.parametrize("pooling", ["native", "mean"])
def test_the_heads_rate_is_for_new_weights_only(
    tmp_path: Path, architecture: str, head: set[str], pooling: str
) -> None:
    settings = ModelConfig.model_validate({"name": str(tiny_model(tmp_path, architecture)), "pooling": pooling})
    model = build_model(settings, ("a", "b"), seed=0)
    got = rates(model, OptimConfig(learning_rate=1.0, head_learning_rate=7.0))
    assert {rate for rate, _ in got.values()} == {1.0, 7.0}
    own = {name.partition(".")[0] for name, (rate, _) in got.items() if rate == 7.0}
    assert own == (head if pooling == "native" else {"classifier"})
    groups = build_optimizer(
        model.named_parameters(), parameter_depth(model), OptimConfig(learning_rate=1.0, head_learning_rate=7.0)
    ).param_groups
    assert groups[0]["lr"] == 7.0


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    groups = parameter_groups(model.named_parameters(), dict.fromkeys(dict(model.named_parameters()), 0), OptimConfig())
    assert sum(len(group["params"]) for group in groups) == 2


def test_one_step_equals_adamw_by_formula() -> None:
    settings = OptimConfig(learning_rate=0.1, weight_decay=0.2, beta1=0.8, beta2=0.9, epsilon=1e-6)
    weight = nn.Parameter(torch.tensor([[1.0, -2.0]]))
    optimizer = build_optimizer([("w", weight)], {"w": 0}, settings)
    gradient = torch.tensor([[0.5, 0.25]])
    weight.grad = gradient.clone()
    optimizer.step()
    start = torch.tensor([[1.0, -2.0]])
    first, second = (1 - 0.8) * gradient / (1 - 0.8), (1 - 0.9) * gradient**2 / (1 - 0.9)
    expected = start * (1 - 0.1 * 0.2) - 0.1 * first / (second.sqrt() + 1e-6)
    torch.testing.assert_close(weight.data, expected)


@pytest.mark.parametrize(
    ("schedule", "reference"),
    [("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)],
)
def test_schedule_has_the_shape_of_transformers(schedule: str, reference: object) -> None:
    """The same curve after warmup; in warmup ours is one step ahead, for its first step already moves."""
    settings = OptimConfig.model_validate({"schedule": schedule, "warmup_fraction": 0.2})
    expected = reference(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), 10, 50).lr_lambdas[0]  # type: ignore[operator]
    for step in range(50):
        wanted = expected(step + 1 if step < 10 else step)
        assert learning_rate_factor(settings, 50, step) == pytest.approx(wanted), step


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("total", [1, 2, 7, 100])
def test_first_and_last_step_still_move_and_zero_comes_after(schedule: str, total: int) -> None:
    settings = OptimConfig.model_validate({"schedule": schedule})
    factors = [learning_rate_factor(settings, total, step) for step in range(total)]
    assert all(factor > 0 for factor in factors)
    assert max(factors) == 1.0
    assert learning_rate_factor(settings, total, total) == pytest.approx(0.0)


def test_each_group_follows_the_schedule_from_its_own_peak() -> None:
    a, b = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    settings = OptimConfig(learning_rate=1.0, layer_decay=0.5, schedule="constant", warmup_fraction=0.5)
    optimizer = build_optimizer([("a", a), ("b", b)], {"a": 0, "b": 1}, settings)
    schedule = build_schedule(optimizer, settings, 4)
    assert schedule.get_last_lr() == [0.5, 0.25]
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == [1.0, 0.5]
    assert all(math.isfinite(rate) for rate in schedule.get_last_lr())
