"""Real gloo processes against one plain PyTorch loop: the curve does not depend on the number of workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.gloo import run_gloo
from tests.distributed.training import SIZES, Sizes, make_config, plain_loop, train_on_rank

WEIGHTS = (0.5, 1.0, 4.0)
ONE_ROW_LEFT: Sizes = (41, 15, 4)
"""The last batch of an epoch has one row: two of three workers have none."""

Expected = Callable[[Sizes, tuple[float, ...] | None], dict[str, Any]]


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """The plain loop over these rows with these class weights; each is trained once."""
    made: dict[Any, dict[str, Any]] = {}

    def get(sizes: Sizes, weights: tuple[float, ...] | None) -> dict[str, Any]:
        if (sizes, weights) not in made:
            made[sizes, weights] = plain_loop(make_config(model), tmp_path_factory.mktemp("plain"), sizes, weights)
        return made[sizes, weights]

    return get


@pytest.mark.parametrize(
    ("world_size", "budget", "sizes", "weights"),
    [
        (1, 4096, SIZES, None),
        (1, 40, SIZES, WEIGHTS),
        (2, 4096, SIZES, None),
        (2, 40, ONE_ROW_LEFT, WEIGHTS),
        (3, 40, SIZES, None),
        (3, 4096, ONE_ROW_LEFT, WEIGHTS),
    ],
    ids=["one", "one-weights", "two", "two-weights-one-row", "three", "three-weights-one-row"],
)
def test_training_equals_a_plain_loop(
    model: Path,
    expected: Expected,
    tmp_path: Path,
    world_size: int,
    budget: int,
    sizes: Sizes,
    weights: tuple[float, ...] | None,
) -> None:
    config, plain = make_config(model, tokens_per_micro_batch=budget), expected(sizes, weights)
    results = run_gloo(train_on_rank, world_size, tmp_path, config, tmp_path / "run", sizes, weights)
    records = results[0]["records"]
    assert [r["step"] for r in records] == list(range(1, len(plain["records"]) + 1))
    ours = [(r["loss"], r["grad_norm"], r["learning_rate"]) for r in records]
    np.testing.assert_allclose(ours, plain["records"], rtol=1e-5)
    for name, tensor in plain["weights"].items():
        for result in results:
            np.testing.assert_allclose(result["weights"][name], tensor, rtol=1e-3, atol=1e-4, err_msg=name)
    for result in results:
        scores = result["scores"]
        assert scores["rows_seen"] == scores["rows"] == 15
        for metric in ("accuracy", "macro_f1", "weighted_f1", "mcc"):
            assert scores[metric] == plain["scores"][metric], metric
        assert scores["loss"] == pytest.approx(plain["scores"]["loss"], rel=1e-4)


def test_weights_matter(expected: Expected) -> None:
    plain, weighted = (np.array(expected(ONE_ROW_LEFT, w)["records"]) for w in (None, WEIGHTS))
    assert not np.allclose(plain[:, 0], weighted[:, 0], rtol=1e-2)
