"""Checkpoints come back exactly, hold no pickle, and the best and the last are always kept."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from raytrain_bert.checkpoint import CheckpointStore, Progress, storage_error, training_tensors
from raytrain_bert.config.errors import RunFolderError
from raytrain_bert.run_folder import RunFolder


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
    store = CheckpointStore(tmp_path)
    store.save(training_tensors(model, optimizer, None), Progress(step=1))
    path = store.path(1)
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}


def test_a_damaged_progress_file_is_a_readable_error(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save({"x": torch.ones(2)}, Progress(step=1))
    (store.path(1) / "progress.json").write_text("{")
    with pytest.raises(RunFolderError, match=r"progress\.json"):
        store.read_progress(1)


def test_the_state_of_the_gradient_scaler_is_saved(tmp_path: Path) -> None:
    model, optimizer = make_training(0)
    store, scaler = CheckpointStore(tmp_path), torch.amp.GradScaler("cpu", init_scale=1024.0)
    store.save(training_tensors(model, optimizer, scaler), Progress(step=1))
    other = torch.amp.GradScaler("cpu", init_scale=2.0)
    store.load(1, training_tensors(model, optimizer, other))
    assert other.get_scale() == 1024.0


def tensors() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(1000.0)}


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def change_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, r"has [\d,]+ of [\d,]+ bytes"),
        (Path.unlink, "is missing"),
        (change_a_byte, "has changed"),
    ],
)
@pytest.mark.parametrize("background", [False, True])
def test_a_damaged_newest_checkpoint_is_put_aside_with_a_warning(
    tmp_path: Path, damage: Callable[[Path], object], words: str, background: bool
) -> None:
    store = CheckpointStore(tmp_path, num_to_keep=5, background=background)
    for step in (1, 2, 3):
        store.save(tensors(), Progress(step=step))
    store.wait()
    (shard,) = store.path(3).glob("*.safetensors")
    damage(shard)
    warnings: list[str] = []
    assert store.newest_intact(warnings.append) == 2
    assert len(warnings) == 1
    assert re.search(rf"step 3 is damaged \(.*{words}", warnings[0])
    assert store.steps() == [1, 2]
    assert (tmp_path / "damaged-step-00000003").is_dir()
    assert store.newest_intact(warnings.append) == 2
    assert len(warnings) == 1


def test_an_unreadable_marker_is_damage_too(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, num_to_keep=5)
    for step in (1, 2):
        store.save(tensors(), Progress(step=step))
    (store.path(2) / "progress.json").write_text('{"progress": {')
    assert store.newest_intact() == 1


def test_in_the_background_the_tensors_are_those_of_the_call(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, background=True)
    changing = tensors()
    progress = Progress(step=1)
    store.save(changing, progress)
    changing["w"].zero_()
    progress.step = 9
    store.wait()
    saved = store.finished()
    assert saved is not None
    assert (saved.step, saved.path) == (1, store.path(1))
    assert 0 <= saved.stall_seconds <= saved.write_seconds
    assert store.finished() is None
    loaded = {"w": torch.empty(1000)}
    store.load(1, loaded)
    assert torch.equal(loaded["w"], tensors()["w"])
    store.close()


def test_the_best_is_never_rotated_away(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, num_to_keep=0, background=True)
    for step in range(1, 6):
        store.save(tensors(), Progress(step=step, best_step=2 if step > 1 else 1))
    store.wait()
    assert store.steps() == [2, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000005"]


def test_what_was_never_noted_is_removed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, num_to_keep=9)
    for step in (10, 20, 30):
        store.save(tensors(), Progress(step=step))
    assert store.remove_unrecorded(25) == [30]
    assert store.remove_unrecorded(20) == []
    assert store.steps() == [10, 20]


def test_workers_that_outlive_the_driver_leave_what_it_goes_on_from(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    store = CheckpointStore(tmp_path / "checkpoints", num_to_keep=1, noted=folder.last_checkpoint)
    for step in range(10, 70, 10):
        # The driver notes the checkpoint of step 20 and dies; what was best then is not any more.
        store.save(tensors(), Progress(step=step, best_step=10 if step <= 20 else step))
        if step == 20:
            folder.update(last_checkpoint=store.path(step).name)
    assert store.steps() == [10, 20, 50, 60]
    assert store.remove_unrecorded(25) == [50, 60]
    folder.update(last_checkpoint="step-00000010")
    store.save(tensors(), Progress(step=30, best_step=30))
    assert store.steps() == [10, 20, 30]
    folder.update(last_checkpoint="step-00000030")
    store.save(tensors(), Progress(step=40, best_step=40))
    assert store.steps() == [30, 40]
    CheckpointStore(tmp_path / "checkpoints", num_to_keep=0).tidy()
    assert store.steps() == [40]


def test_leftovers_of_an_interrupted_save_are_removed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(tensors(), Progress(step=1))
    (tmp_path / ".step-00000002.tmp").mkdir()
    (tmp_path / ".step-00000002.tmp" / "x.safetensors").write_bytes(b"half")
    store.remove_leftovers()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_real_full_disk_is_found_inside_what_the_writers_raise() -> None:
    try:
        with open("/dev/full", "w") as file:
            file.write("x" * 100_000)
    except OSError as error:
        full = error
    wrapped = RuntimeError("writing failed")
    wrapped.__cause__ = full
    found = storage_error(wrapped)
    assert found is not None
    assert found.errno == errno.ENOSPC
    rust = Exception("Error while serializing: I/O error: No space left on device (os error 28)")
    found = storage_error(rust)
    assert found is not None
    assert found.errno == errno.ENOSPC
    assert storage_error(ValueError("something else")) is None
