"""What is made of the best trials: the greedy soup, and a training that ends where the winner was best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain_bert.checkpoint import CheckpointStore, Progress, training_tensors
from raytrain_bert.soup import greedy_soup
from tests.distributed.training import events, make_config, make_parts, train_to_the_end
from tests.tiny import tiny_bert


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("model") / "tiny")


def checkpoint_of(parts: Any, folder: Path, value: float) -> str:
    """A checkpoint whose weights all have one value."""
    tensors = training_tensors(parts.module, None, None)
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.fill_(value)
    store = CheckpointStore(folder / "checkpoints", background=False)
    store.save(tensors, Progress(step=1), None, started=0.0)
    store.close()
    return str(store.path(1))


def test_a_greedy_soup_takes_what_makes_it_better_and_leaves_the_rest(model: Path, tmp_path: Path) -> None:
    parts = make_parts(make_config(model), tmp_path / "first")
    values = (1.0, 9.0, 2.0, 1.5)
    ingredients = tuple(checkpoint_of(parts, tmp_path / str(value), value) for value in values)
    soup = make_parts(make_config(model), tmp_path / "soup", ingredients=ingredients)
    weight = next(iter(training_tensors(soup.module, None, None).values()))

    def score() -> float:  # best where all weights are 1.5
        return 1 - abs(float(weight.flatten()[0]) - 1.5)

    came = greedy_soup(soup, score)
    # 1 alone; (1 + 9) / 2 is worse; (1 + 2) / 2 is right; with 1.5 it is no better.
    assert came == {"score": pytest.approx(1.0), "alone": pytest.approx(0.5), "chosen": [0, 2]}
    for tensor in training_tensors(soup.module, None, None).values():
        assert torch.allclose(tensor.float(), torch.full_like(tensor.float(), 1.5))


def test_training_up_to_an_epoch_follows_the_whole_schedule(model: Path, tmp_path: Path) -> None:
    config = make_config(model, num_epochs=4)
    whole = make_parts(config, tmp_path / "whole")
    train_to_the_end(whole, Progress())
    part, progress = make_parts(config, tmp_path / "part", stop_after_epochs=1.5), Progress()
    train_to_the_end(part, progress)
    assert progress.step == part.last_step == round(1.5 * part.steps_per_epoch)
    (expected, found) = ([r for event in events(parts, "steps") for r in event["records"]] for parts in (whole, part))
    assert len(found) == progress.step < len(expected)
    for one, other in zip(expected, found, strict=False):
        assert (one["learning_rate"], one["loss"]) == (other["learning_rate"], other["loss"])
