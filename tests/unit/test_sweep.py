"""Search spaces, samples, concurrency and the choice of the winner."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytrain_bert.config.errors import ConfigError, ResourceError
from raytrain_bert.config.load import load_config
from raytrain_bert.config.schema import ScalingSettings
from raytrain_bert.config.sweep import SweepConfig, SweepSettings
from raytrain_bert.runtime import Node
from raytrain_bert.sweep.importance import importances
from raytrain_bert.sweep.records import SweepFolder, Trial, best_of, to_csv
from raytrain_bert.sweep.resources import plan_trials
from raytrain_bert.sweep.space import Space, read_space, with_sample
from raytrain_bert.tune import split_search_flags, with_search

BASE = load_config({"data.train": ["x.csv"]})


def space_of(**search: Any) -> Space:
    return read_space({key.replace("__", "."): domain for key, domain in search.items()}, BASE)


def draws(space: Space, count: int = 200) -> list[dict[str, Any]]:
    return [space.draw(np.random.default_rng(seed)) for seed in range(count)]


def test_draws_lie_in_their_domains_and_fill_them() -> None:
    space = space_of(
        optim__learning_rate={"loguniform": ["1e-5", 1e-3]},
        optim__beta1={"quniform": [0.1, 0.9, 0.2]},
        train__num_epochs={"randint": [1, 4]},
        train__global_batch_size="choice:16,32",
    )
    samples = draws(space)
    rates = [sample["optim.learning_rate"] for sample in samples]
    assert min(rates) >= 1e-5
    assert max(rates) <= 1e-3
    assert 0.4 < np.mean([rate < 1e-4 for rate in rates]) < 0.6
    assert {sample["optim.beta1"] for sample in samples} == {0.2, 0.4, 0.6, 0.8}
    assert {sample["train.num_epochs"] for sample in samples} == {1, 2, 3}
    assert {sample["train.global_batch_size"] for sample in samples} == {16, 32}


def test_a_condition_decides_whether_a_setting_is_searched() -> None:
    space = space_of(
        optim__layer_decay={"uniform": [0.5, 1.0], "when": {"model.freeze-encoder": False}},
        model__freeze_encoder={"choice": [True, False]},
    )
    for sample in draws(space, 40):
        assert ("optim.layer_decay" in sample) == (not sample["model.freeze_encoder"])


def test_a_grid_has_every_combination_once_and_none_twice() -> None:
    space = space_of(
        model__freeze_encoder={"grid": [True, False]},
        optim__layer_decay={"grid": [0.5, 1.0], "when": {"model.freeze_encoder": False}},
        optim__learning_rate={"grid": [1e-5, 1e-4]},
    )
    samples = space.grid()
    assert len(samples) == 6
    assert all(samples.count(sample) == 1 for sample in samples)


@pytest.mark.parametrize(
    ("search", "words"),
    [
        ({"optim.lerning_rate": {"uniform": [0, 1]}}, "did you mean optim.learning_rate"),
        ({"optim.beta1": {"choice": [0.5, 1.5]}}, "less than 1, not 1.5"),
        ({"train.global_batch_size": {"uniform": [8, 32]}}, "fractional part"),
        ({"optim.learning_rate": {"loguniform": [0, 1]}}, "above 0"),
        ({"optim.learning_rate": {"lognormal": [0, 1]}}, "there are uniform"),
        ({"optim.learning_rate": {"uniform": [1]}}, "takes 2 numbers"),
        ({"train.best_metric": {"choice": ["loss"]}}, "cannot be searched"),
        ({"data.split_seed": {"choice": [1]}}, "cannot be searched"),
        ({"optim.beta1": {"choice": [0.5], "when": {"optim.beta2": 0.9}}}, "not searched itself"),
    ],
)
def test_what_cannot_be_searched_is_refused_with_a_reason(search: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_space(search, BASE)


def test_flags_add_to_the_file_and_take_out_of_it() -> None:
    rest, searched = split_search_flags(
        ["--optim.beta1", "0.8", "--search.optim.learning-rate", "grid:1e-5,1e-4", "--search.optim.beta2=none"]
    )
    assert rest == ["--optim.beta1", "0.8"]
    config = SweepConfig(search={"optim.beta2": {"choice": [0.9]}, "optim.epsilon": {"choice": [1e-8]}})
    search = with_search(config, searched, resumed=False).search
    assert search == {"optim.epsilon": {"choice": [1e-8]}, "optim.learning_rate": {"grid": ["1e-5", "1e-4"]}}
    with pytest.raises(ConfigError, match="KIND:ARGUMENT"):
        split_search_flags(["--search.optim.beta1", "0.5"])


def test_a_sample_becomes_the_configuration_of_its_trial() -> None:
    config = with_sample(BASE, {"optim.learning_rate": 0.5, "model.pooling": "mean"})
    assert (config.optim.learning_rate, config.model.pooling) == (0.5, "mean")
    assert config.train == BASE.train


@pytest.mark.parametrize(
    ("cpus", "gpus", "workers", "share", "expected"),
    [
        (1, 0, None, None, (1, 1, 0)),
        (2, 0, None, None, (2, 1, 0)),
        (4, 0, None, None, (4, 1, 0)),
        (2, 0, 2, None, (1, 2, 0)),
        (8, 2, None, None, (2, 4, 1)),
        (8, 2, None, 0.5, (4, 2, 0.5)),
        (8, 2, 2, None, (1, 8, 2)),
    ],
)
def test_no_more_trials_at_a_time_than_there_is_room_for(
    cpus: int, gpus: int, workers: int | None, share: float | None, expected: tuple[int, int, float]
) -> None:
    plan = plan_trials(ScalingSettings(num_workers=workers), SweepSettings(gpus_per_trial=share), [Node(cpus, gpus)], 8)
    assert (plan.concurrent, plan.cpus, plan.gpus) == expected
    assert plan.concurrent * plan.cpus <= cpus
    assert plan.concurrent * plan.gpus <= gpus


def test_a_trial_that_never_fits_is_refused() -> None:
    with pytest.raises(ResourceError, match="1 CPU each has no room"):
        plan_trials(ScalingSettings(num_workers=9), SweepSettings(), [Node(2, 0)], 8)
    with pytest.raises(ResourceError, match="needs 4 GPUs"):
        plan_trials(ScalingSettings(num_workers=4, use_gpu=True), SweepSettings(), [Node(8, 2)], 8)


def trial(number: int, score: float | None, **more: Any) -> Trial:
    fields: dict[str, Any] = {"status": "trained", "best_score": score}
    return Trial(number, {"optim.learning_rate": number * 1e-4}, **(fields | more))


def test_the_best_epoch_wins_and_neither_nan_nor_a_failed_trial_does() -> None:
    trials = [trial(1, None), trial(2, 0.7), trial(3, 0.9), trial(4, 0.99, status="failed"), trial(5, math.nan)]
    best = best_of(trials, "accuracy")
    assert best is not None
    assert best.number == 3
    best = best_of(trials, "loss")
    assert best is not None
    assert best.number == 2
    assert best_of([trial(1, None), trial(2, 0.7, status="failed")], "accuracy") is None


def test_trials_come_back_from_their_file(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    trials = [trial(1, 0.1 + 0.2, effective={"optim.learning_rate": 1e-4}), trial(2, None, why='a "b", c')]
    folder.write(trials, ["optim.learning_rate"], "accuracy")
    assert folder.read() == trials
    (first, second) = csv.DictReader(io.StringIO(to_csv(trials, ["optim.learning_rate"], "accuracy")))
    assert float(first["best_score"]) == 0.1 + 0.2
    assert first["effective:optim.learning_rate"] == "0.0001"
    assert (second["why"], second["best_score"]) == ('a "b", c', "")


def test_importance_is_the_rank_correlation_of_pandas() -> None:
    space = space_of(optim__learning_rate={"uniform": [0, 1]})
    rng = np.random.default_rng(0)
    rates, scores = rng.random(20), rng.random(20)
    trials = [
        Trial(n, {"optim.learning_rate": x}, best_score=y) for n, (x, y) in enumerate(zip(rates, scores, strict=True))
    ]
    from scipy.stats import spearmanr

    expected = abs(float(spearmanr(rates, scores).statistic))
    assert importances(trials, space, "accuracy")["optim.learning_rate"] == pytest.approx(expected)
