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


def test_a_used_folder_is_refused_and_overwrite_empties_it(tmp_path: Path) -> None:
    folder = make(tmp_path, status="interrupted")
    with pytest.raises(RunFolderError, match=r"--resume .* --overwrite"):
        RunFolder.for_new_run(str(tmp_path), "run", overwrite=False)
    RunFolder.for_new_run(str(tmp_path), "run", overwrite=True)
    assert not folder.path.exists()


def test_overwrite_never_empties_a_folder_that_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("")
    with pytest.raises(RunFolderError, match="no run of ours"):
        RunFolder.for_new_run(str(tmp_path), "run", overwrite=True)
    assert (tmp_path / "run" / "thesis.tex").exists()


@pytest.mark.parametrize("name", ["../x", "a/b"])
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
