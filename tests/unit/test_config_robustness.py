"""Settings of class weights, elastic training and checkpoints."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sklearn.utils.class_weight import compute_class_weight

from raytrain_bert.config.errors import ConfigError
from raytrain_bert.config.load import dump_yaml, load_config
from raytrain_bert.data.labels import LabelSpace
from raytrain_bert.run import class_weights


def load(**flags: str) -> Any:
    return load_config({"data.train": "x.csv"} | {key.replace("__", "."): value for key, value in flags.items()})


@pytest.mark.parametrize(
    ("given", "range_"), [("2", (2, 2)), ("0", (0, 0)), ("1..4", (1, 4)), ("none", None), ("2 .. 3", (2, 3))]
)
def test_number_of_workers(given: str, range_: tuple[int, int] | None) -> None:
    settings = load(scaling__num_workers=given).scaling
    assert settings.worker_range == range_
    assert settings.is_elastic == (range_ is not None and range_[0] < range_[1])


@pytest.mark.parametrize("given", ["-1", "two", "0..2", "3..2", "2..2", "1.."])
def test_no_number_of_workers(given: str) -> None:
    with pytest.raises(ConfigError, match=r"scaling\.num_workers: "):
        load(scaling__num_workers=given)


def test_class_weights_from_flag_and_file(tmp_path: Path) -> None:
    assert load().train.class_weights is None
    assert load(train__class_weights="balanced").train.class_weights == "balanced"
    assert load(train__class_weights="spam=3,ham = 1").train.class_weights == {"spam": 3.0, "ham": 1.0}
    path = tmp_path / "x.yaml"
    path.write_text("data: {train: x.csv}\ntrain: {class_weights: {spam: 3, 1: 0.5}}\n")
    config = load_config({}, path)
    assert config.train.class_weights == {"spam": 3.0, "1": 0.5}
    path.write_text(dump_yaml(config))
    assert load_config({}, path) == config


@pytest.mark.parametrize("given", ["spam", "spam=0", "spam=-1", "spam=x", "spam=nan", "even"])
def test_no_class_weights(given: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.class_weights: "):
        load(train__class_weights=given)


def prepared(names: tuple[str, ...], counts: tuple[int, ...]) -> Any:
    return SimpleNamespace(labels=LabelSpace(names), label_counts=counts)


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    counts = (10, 3, 27)
    labels = np.repeat([0, 1, 2], counts)
    expected = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    assert class_weights("balanced", prepared(("a", "b", "c"), counts)) == pytest.approx(expected)
    assert class_weights("balanced", prepared(("a", "b"), (4, 0))) == (0.5, 1.0)


def test_weights_go_by_label_and_an_unknown_one_is_refused() -> None:
    data = prepared(("ham", "spam", "eggs"), (5, 5, 5))
    assert class_weights({"spam": 3.0}, data) == (1.0, 3.0, 1.0)
    assert class_weights(None, data) is None
    with pytest.raises(ConfigError, match="spem is no label; labels are ham, spam, eggs"):
        class_weights({"spem": 3.0}, data)


def test_an_unknown_metric_is_refused_with_the_ones_there_are() -> None:
    with pytest.raises(ConfigError, match=r"train\.best_metric: .*'accuracy'.*'macro_f1'.*'mcc'.*'loss'"):
        load(train__best_metric="acuracy")
