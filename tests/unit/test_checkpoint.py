"""Checkpoints come back exactly, hold no pickle, and the best and the last are always kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from raytrain_bert.checkpoint import CheckpointStore, Progress, training_tensors
from raytrain_bert.config.errors import RunFolderError


def make_training(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    model[0].bias.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trained, lr=0.1, fused=True)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_interrupted_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    model, optimizer = make_training(0)
    for step in range(3):
        take_step(model, optimizer, step)
    store.save(training_tensors(model, optimizer, None), Progress(step=3))
    resumed_model, resumed_optimizer = make_training(99)
    store.load(3, training_tensors(resumed_model, resumed_optimizer, None))
    for step in range(3, 6):
        take_step(model, optimizer, step)
        take_step(resumed_model, resumed_optimizer, step)
    for expected, got in zip(model.parameters(), resumed_model.parameters(), strict=True):
        assert torch.equal(expected, got)


def test_progress_comes_back(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    progress = Progress(epoch=1, step_in_epoch=2, step=7, best_score=0.5, best_step=5, stale_validations=1)
    store.save({"x": torch.ones(2)}, progress)
    assert store.read_progress(7) == progress


@pytest.mark.parametrize("num_to_keep", [0, 1, 3, 5])
def test_best_and_last_are_kept_and_as_many_others_as_asked(tmp_path: Path, num_to_keep: int) -> None:
    store = CheckpointStore(tmp_path, num_to_keep)
    for step in range(1, 11):
        store.save({"x": torch.ones(2)}, Progress(step=step, best_step=min(step, 2)))
    newest_others = [step for step in range(1, 10) if step != 2][8 - num_to_keep :]
    assert store.steps() == sorted({2, 10, *newest_others})
    assert store.latest() == 10


def test_a_half_written_checkpoint_does_not_count(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save({"x": torch.ones(2)}, Progress(step=1, best_step=1))
    (tmp_path / ".step-00000002.tmp").mkdir()
    (tmp_path / "step-00000003").mkdir()
    assert store.latest() == 1


def test_only_safetensors_and_json_are_written(tmp_path: Path) -> None:
    model, optimizer = make_training(0)
    path = CheckpointStore(tmp_path).save(training_tensors(model, optimizer, None), Progress(step=1))
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}


def test_a_damaged_progress_file_is_a_readable_error(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    (store.save({"x": torch.ones(2)}, Progress(step=1)) / "progress.json").write_text("{")
    with pytest.raises(RunFolderError, match=r"progress\.json"):
        store.read_progress(1)


def test_the_state_of_the_gradient_scaler_is_saved(tmp_path: Path) -> None:
    model, optimizer = make_training(0)
    store, scaler = CheckpointStore(tmp_path), torch.amp.GradScaler("cpu", init_scale=1024.0)
    store.save(training_tensors(model, optimizer, scaler), Progress(step=1))
    other = torch.amp.GradScaler("cpu", init_scale=2.0)
    store.load(1, training_tensors(model, optimizer, other))
    assert other.get_scale() == 1024.0
