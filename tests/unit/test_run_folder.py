"""A used folder is refused, a resumed one is checked, and its files stay strict JSON."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from raytrain_bert.config.errors import ConfigError, RunFolderError
from raytrain_bert.run_folder import RunFolder, provenance


def make(tmp_path: Path, **state: object) -> RunFolder:
    folder = RunFolder.for_new_run(str(tmp_path), "run", overwrite=False)
    folder.create("train: {}\n")
    folder.update(**state)
    return folder


def test_a_used_folder_is_refused(tmp_path: Path) -> None:
    make(tmp_path, status="interrupted")
    with pytest.raises(RunFolderError, match=r"--resume .* --overwrite"):
        RunFolder.for_new_run(str(tmp_path), "run", overwrite=False)


def test_what_is_written_over_goes_when_training_begins(tmp_path: Path) -> None:
    make(tmp_path, status="finished").model_path.mkdir()
    folder = RunFolder.for_new_run(str(tmp_path), "run", overwrite=True)
    folder.create("train: {}\n")
    assert not folder.model_path.exists()
    folder.begin()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert folder.state()["status"] == "running"


def test_what_is_written_over_comes_back_if_the_new_run_never_trains(tmp_path: Path) -> None:
    old = make(tmp_path, status="finished")
    old.model_path.mkdir()
    folder = RunFolder.for_new_run(str(tmp_path), "run", overwrite=True)
    folder.create("train: {}\n")
    folder.give_up()
    assert old.model_path.is_dir()
    assert old.state()["status"] == "finished"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_that_died_while_it_prepared_can_be_written_over_without_loss(tmp_path: Path) -> None:
    old = make(tmp_path, status="finished")
    old.model_path.mkdir()
    RunFolder.for_new_run(str(tmp_path), "run", overwrite=True).create("train: {}\n")  # and it dies
    again = RunFolder.for_new_run(str(tmp_path), "run", overwrite=True)
    again.create("train: {}\n")
    again.give_up()
    assert old.model_path.is_dir()


def test_a_folder_that_is_new_is_gone_after_giving_up(tmp_path: Path) -> None:
    make(tmp_path).give_up()
    assert not list(tmp_path.iterdir())


def test_the_confusion_matrix_is_json(tmp_path: Path) -> None:
    folder = make(tmp_path)
    folder.write_confusion(["a", "b"], [[1, 2], [3, 4]])
    content = json.loads((folder.path / "confusion.json").read_text())
    assert content == {"labels": ["a", "b"], "matrix": [[1, 2], [3, 4]]}


def test_overwrite_never_empties_a_folder_that_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("")
    with pytest.raises(RunFolderError, match="no run of ours"):
        RunFolder.for_new_run(str(tmp_path), "run", overwrite=True)
    assert (tmp_path / "run" / "thesis.tex").exists()


@pytest.mark.parametrize("name", ["../x", "a/b", "..", "."])
def test_a_name_cannot_leave_the_storage_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        RunFolder.for_new_run(str(tmp_path), name, overwrite=False)


def test_a_finished_run_cannot_be_resumed(tmp_path: Path) -> None:
    folder = make(tmp_path, status="finished")
    with pytest.raises(RunFolderError, match="has finished"):
        RunFolder.to_resume(str(folder.path))


def test_a_run_of_a_living_process_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path, status="running", host=socket.gethostname(), pid=os.getppid())
    with pytest.raises(RunFolderError, match="still going on"):
        RunFolder.to_resume(str(folder.path))


def test_a_run_whose_process_is_dead_can_be_resumed(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    folder = make(tmp_path, status="running", host=socket.gethostname(), pid=pid)
    assert RunFolder.to_resume(str(folder.path)).path == folder.path


def test_resume_drops_the_metrics_that_will_be_written_again(tmp_path: Path) -> None:
    folder = make(tmp_path)
    folder.append_metrics(json.dumps({"step": step}) for step in (1, 2, 3))
    with folder.metrics_path.open("a") as file:
        file.write('{"step": 4, "lo')  # a killed run's last line
    folder.cut_metrics(2)
    assert [json.loads(line)["step"] for line in folder.metrics_path.read_text().splitlines()] == [1, 2]


def test_provenance_is_strict_json() -> None:
    content = json.loads(json.dumps(provenance(["raytrain-bert", "train"]), allow_nan=False))
    assert content["versions"]["torch"]


def test_dropped_metrics_are_given_back_and_the_last_step_is_known(tmp_path: Path) -> None:
    folder = make(tmp_path)
    assert folder.last_recorded_step() == 0
    lines = [{"kind": "train", "step": step} for step in (1, 2, 3)] + [{"kind": "validation", "step": 9}]
    folder.append_metrics(json.dumps(line) for line in lines)
    assert folder.last_recorded_step() == 3
    assert folder.cut_metrics(2) == lines[2:]
    assert folder.last_recorded_step() == 2


def test_temporary_files_are_gone_after_a_run(tmp_path: Path) -> None:
    folder = make(tmp_path)
    (folder.path / "checkpoints" / ".step-00000001.tmp").mkdir(parents=True)
    (folder.path / ".model.tmp").mkdir()
    (folder.path / "run.tmp").write_text("{")
    kept = {"config.yaml", "run.json", "logs", "checkpoints"}
    folder.remove_leftovers()
    assert {path.name for path in folder.path.iterdir()} == kept
    assert not list((folder.path / "checkpoints").iterdir())


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
def test_a_run_whose_process_has_ended_unseen_can_be_resumed(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # ended, and left a zombie
    folder = make(tmp_path, status="running", host=socket.gethostname(), pid=pid)
    try:
        assert RunFolder.to_resume(str(folder.path)).path == folder.path
    finally:
        os.waitpid(pid, 0)
