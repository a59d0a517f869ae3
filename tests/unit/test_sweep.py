"""Search spaces, samples, concurrency and the choice of the winner."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.tune.schedulers import TrialScheduler

from raytrain_bert.config.errors import ConfigError, ResourceError, RunFolderError
from raytrain_bert.config.load import dump_yaml, load_config
from raytrain_bert.config.schema import ScalingSettings
from raytrain_bert.config.sweep import SweepConfig, SweepSettings
from raytrain_bert.runtime import Node
from raytrain_bert.sweep.importance import importances
from raytrain_bert.sweep.records import SweepFolder, Trial, best_of, to_csv
from raytrain_bert.sweep.resources import plan_trials
from raytrain_bert.sweep.schedule import Explorer, build_scheduler, remember
from raytrain_bert.sweep.search import TPE
from raytrain_bert.sweep.space import Space, read_space, with_sample
from raytrain_bert.tune import kept_told, split_search_flags, to_resume, with_search

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


def test_a_model_folder_is_searched_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    (domain,) = space_of(model__name={"choice": ["tiny", "bert-base-uncased"]}).domains
    assert domain.arguments == (str(tmp_path / "tiny"), "bert-base-uncased")


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


def tpe(space: Space, earlier: list[Trial], num_trials: int = 20) -> TPE:
    return TPE(SweepSettings(num_trials=num_trials), space, BASE, earlier)


def test_tpe_never_tries_a_sample_twice_and_ends_with_the_space() -> None:
    space = space_of(train__global_batch_size={"choice": [8, 16, 32]}, model__pooling={"choice": ["mean", "cls"]})
    earlier = [Trial(1, {"train.global_batch_size": 8, "model.pooling": "mean"}, status="trained", best_score=0.5)]
    source = tpe(space, earlier)
    samples = [earlier[0].sample]
    for number in range(2, 20):
        sample = source.next(number)
        if sample is None:
            break
        samples.append(sample)
        source.tell(number, None if number == 3 else 0.1 * number)
    assert len(samples) == 6
    assert all(samples.count(sample) == 1 for sample in samples)


def rates_of(source: TPE, numbers: range) -> list[float]:
    """The learning rates that it asks for, where 1e-3 is best."""
    rates = []
    for number in numbers:
        sample = source.next(number)
        assert sample is not None
        rates.append(sample["optim.learning_rate"])
        source.tell(number, -distance(rates[-1:]))
    return rates


def distance(rates: list[float]) -> float:
    """Mean distance from 1e-3, in decades."""
    return float(np.mean([abs(math.log10(rate) + 3) for rate in rates]))


def test_tpe_goes_where_the_scores_are_good_also_after_a_resume() -> None:
    space = space_of(optim__learning_rate={"loguniform": [1e-6, 1e-1]})
    at_random = 1.3  # of even draws over -6 to -1
    rates = rates_of(tpe(space, [], 40), range(1, 41))
    assert distance(rates[20:]) < 0.6 * at_random
    earlier = [
        Trial(n, {"optim.learning_rate": rate}, status="trained", best_score=-distance([rate]))
        for n, rate in enumerate(rates[:25], 1)
    ]
    assert distance(rates_of(tpe(space, earlier, 40), range(26, 46))) < 0.6 * at_random


class Reported:
    """A trial, as Ray Tune hands it to a scheduler."""

    def __init__(self, number: int) -> None:
        self.trial_id, self.number, self.status = str(number), number, "RUNNING"

    def __str__(self) -> str:
        return f"{self.number:04d} learning_rate 1"


def ended_early(scheduler: Any, curves: dict[int, list[float]]) -> dict[int, int]:
    """Epochs after which each trial was ended; the trials run one after the other."""
    ended = {}
    for number, scores in curves.items():
        trial = Reported(number)
        scheduler.on_trial_add(None, trial)
        for epoch, value in enumerate(scores, 1):
            result = {"score": value, "value": value, "epoch": epoch, "training_iteration": epoch}
            if scheduler.on_trial_result(None, trial, result) == TrialScheduler.STOP:
                ended[number] = epoch
                break
        scheduler.on_trial_complete(None, trial, result)
    return ended


GOOD, BAD = [0.6, 0.7, 0.8, 0.9], [0.1, 0.1, 0.1, 0.1]


@pytest.mark.parametrize(
    ("scheduler", "grace", "expected", "why"),
    [
        ("asha", 1, {4: 1}, "asha after 1 epochs: 0.1 is not among the best 1/3"),
        ("asha", 2, {4: 2}, "asha after 2 epochs: 0.1 is not among the best 1/3"),
        ("median", 1, {4: 1}, "median after 1 epochs: its best is below the median of the others"),
        ("median", 3, {4: 3}, "median after 3 epochs: its best is below the median of the others"),
        ("none", 1, {}, None),
    ],
)
def test_a_hopeless_trial_is_ended_once_its_grace_is_over_and_told_why(
    scheduler: Any, grace: float, expected: dict[int, int], why: str | None
) -> None:
    reasons: dict[int, str] = {}
    settings = SweepSettings(scheduler=scheduler, grace=grace)
    built = build_scheduler(settings, space_of(optim__beta1={"uniform": [0.1, 0.9]}), BASE, reasons, 4)
    assert ended_early(built, {1: GOOD, 2: GOOD, 3: GOOD, 4: BAD}) == expected
    assert reasons.get(4) == why


def test_a_resumed_scheduler_compares_with_the_trials_of_before() -> None:
    for name in ("asha", "median"):
        reasons: dict[int, str] = {}
        settings = SweepSettings(scheduler=name)  # type: ignore[arg-type]
        built = build_scheduler(settings, space_of(optim__beta1={"uniform": [0.1, 0.9]}), BASE, reasons, 4)
        for number in (1, 2, 3):
            remember(built, number, [{"score": value, "value": value, "epoch": n} for n, value in enumerate(GOOD, 1)])
        assert ended_early(built, {4: BAD}) == {4: 1}, name


def test_pbt_moves_what_may_change_in_mid_run_and_nothing_else() -> None:
    space = space_of(
        optim__learning_rate={"loguniform": [1e-5, 1e-3]},
        train__global_batch_size={"choice": [8, 16]},
        optim__layer_decay={"quniform": [0.5, 1.0, 0.1]},
    )
    explorer = Explorer(space, BASE, seed=0)
    sample = {"optim.learning_rate": 1e-4, "train.global_batch_size": 16, "optim.layer_decay": 0.8}
    moved = [explorer({"trial": {"number": 1, "sample": sample}})["trial"]["sample"] for _ in range(50)]
    assert {m["train.global_batch_size"] for m in moved} == {16}
    rates = [m["optim.learning_rate"] for m in moved]
    near = sum(min(abs(rate - 0.8e-4), abs(rate - 1.2e-4)) < 1e-12 for rate in rates)
    assert 0.5 * len(rates) < near < len(rates)  # the others are drawn anew
    assert all(1e-5 <= rate <= 1e-3 for rate in rates)


def test_a_finished_sweep_goes_on_only_with_a_larger_budget(tmp_path: Path) -> None:
    config = SweepConfig(sweep=SweepSettings(num_trials=4, minutes=10))
    folder = SweepFolder(tmp_path)
    folder.config_path.write_text(dump_yaml(config), encoding="utf-8")
    folder.state.update(status="finished", trials=4)

    def resume(**changed: Any) -> SweepFolder:
        return to_resume(str(tmp_path), config.model_copy(update={"sweep": config.sweep.model_copy(update=changed)}))

    for changed in ({}, {"num_trials": 4}, {"num_trials": 3}, {"minutes": 9.0}):
        with pytest.raises(RunFolderError, match=r"has finished.*--sweep.num-trials N, with N above 4"):
            resume(**changed)
    for changed in ({"num_trials": 5}, {"num_trials": None}, {"minutes": 11.0}, {"minutes": None}):
        assert resume(**changed).path == tmp_path
    with pytest.raises(RunFolderError, match="cannot grow"):
        resume(num_trials=5, scheduler="pbt")


def test_a_resumed_sweep_tells_what_it_keeps() -> None:
    numbers = {1: "trained", 2: "stopped", 3: "running", 4: "failed", 6: "unfinished"}
    trials = [Trial(number, {}, status=status) for number, status in numbers.items()]  # type: ignore[arg-type]
    assert kept_told(trials) == "keeping trials 1-2, 4, going on with trials 3, 6 from the last checkpoint"
    assert kept_told([]) == "no trial had begun"


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
