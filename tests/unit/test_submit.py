"""What is sent to a cluster, and what is refused before."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_bert import submit
from raytrain_bert.command import parse_command, resume_command
from raytrain_bert.config.errors import ConfigError
from raytrain_bert.config.load import JOB_FOLDERS, dump_yaml, load_config, with_absolute_paths
from raytrain_bert.runtime import job_env_vars


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, count in {
        "code.py": 10,
        "data/big.csv": 5000,
        "weights/model.bin": 90,
        "runs/x/y": 70,
        ".git/z": 60,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * count)
    (tmp_path / ".gitignore").write_text("runs/\n", encoding="utf-8")
    return tmp_path


def test_an_upload_is_what_ray_packs(project: Path) -> None:
    from ray._private.runtime_env.packaging import create_package

    upload = submit.measure(project, ["data"])
    assert upload.sizes == {"code.py": 10, "weights": 90, ".gitignore": 6}
    assert upload.largest().startswith("weights 90 bytes, code.py 10 bytes")
    package = project.parent / f"{project.name}.zip"
    create_package(str(project), package, include_gitignore=True, excludes=["data", ".git"])
    import zipfile

    packed = [info for info in zipfile.ZipFile(package).infolist() if not info.is_dir()]
    assert sum(info.file_size for info in packed) == upload.total


def test_too_large_an_upload_is_refused_and_its_largest_entries_are_named(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ray._private.runtime_env.packaging.GCS_STORAGE_MAX_SIZE", 4000)
    with pytest.raises(ConfigError, match=r"Ray takes 4.0 kB. Largest: data 5.0 kB, weights"):
        submit.check_size(submit.measure(project, []))
    monkeypatch.setattr(submit, "LARGE_UPLOAD", 50)
    submit.check_size(submit.measure(project, ["data"]))
    assert "Largest: weights 90 bytes" in capsys.readouterr().err


def test_the_runtime_environment_comes_from_the_folder_or_the_file_that_is_named(tmp_path: Path) -> None:
    assert submit.runtime_environment(tmp_path, None) == {}
    (tmp_path / "runtime_env.yaml").write_text("excludes: [a]\n", encoding="utf-8")
    assert submit.runtime_environment(tmp_path, None) == {"excludes": ["a"]}
    other = tmp_path / "other.yaml"
    other.write_text("working_dir: .\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="working_dir is given by --working-dir"):
        submit.runtime_environment(tmp_path, str(other))
    other.write_text("- a\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="expected a mapping, found list"):
        submit.runtime_environment(tmp_path, str(other))


def test_a_job_is_named_by_what_it_makes() -> None:
    assert submit.name_of("train", ["--train.seed", "1", "--output.name", "a"]) == "train a"
    assert submit.name_of("tune", ["--resume", "runs/b"]) == "sweep b"
    assert submit.name_of("drill", []) == "drill"


def test_flags_are_checked_here() -> None:
    submit.check_command("tune", ["--data.train", "x.csv", "--search.optim.learning-rate", "uniform:0,1"])
    with pytest.raises(ConfigError, match="did you mean"):
        submit.check_command("train", ["--optim.lerning-rate", "1"])
    with pytest.raises(ConfigError, match="KIND:ARGUMENT"):
        submit.check_command("tune", ["--search.optim.learning-rate", "0.1"])


def test_a_job_does_not_set_again_what_its_runtime_environment_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    assert job_env_vars() == {}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"runtime_env": {"env_vars": {"A": "1"}}, "metadata": {}}')
    assert job_env_vars() == {"A": "1"}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"metadata": {}}')
    assert job_env_vars() == {}


def test_what_a_job_writes_goes_to_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked = tmp_path / JOB_FOLDERS.strip("/") / "_ray_pkg_1"
    unpacked.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = load_config({"data.train": ["x.csv"]})
    monkeypatch.chdir(tmp_path)
    assert with_absolute_paths(config).output.storage_path == str(tmp_path / "runs")
    assert resume_command("train", "runs/a") == "python -m raytrain_bert.train --resume runs/a"
    monkeypatch.chdir(unpacked)
    found = with_absolute_paths(config)
    assert found.output.storage_path == str(tmp_path / "home" / "runs")
    assert found.data.train == [str(unpacked / "x.csv")]
    assert resume_command("train", "/runs/a") == "raytrain-bert submit train --resume /runs/a"


def test_auto_resume_begins_and_goes_on_with_the_same_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--data.train", "x.csv", "--output.name", "a", "--auto-resume"]
    first = parse_command("train", "", words)
    assert (first.resume, first.auto_resume) == (None, True)
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_yaml(with_absolute_paths(first.config)), encoding="utf-8")
    again = parse_command("train", "", [*words, "--scaling.num-workers", "3"])
    assert again.resume == str(folder)
    assert again.config.scaling.num_workers == 3
    assert again.config.data.train == [str(tmp_path / "x.csv")]
    with pytest.raises(ConfigError, match=r"begun with another optim\.learning_rate"):
        parse_command("train", "", [*words, "--optim.learning-rate", "1e-3"])
    with pytest.raises(ConfigError, match=r"give --output\.name"):
        parse_command("train", "", ["--data.train", "x.csv", "--auto-resume"])
    with pytest.raises(ConfigError, match="exclude each other"):
        parse_command("train", "", [*words, "--overwrite"])


def test_a_resumed_job_finds_what_came_along_in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray unpacks each job's folder to another place, and removes the one before."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    words = ["--data.train", "x.csv", "--model.name", "tiny", "--output.name", "a", "--auto-resume"]
    for number in (1, 2):
        unpacked = tmp_path / JOB_FOLDERS.strip("/") / f"_ray_pkg_{number}"
        (unpacked / "tiny").mkdir(parents=True)
        monkeypatch.chdir(unpacked)
        call = parse_command("train", "", words)
        if number == 1:
            folder = tmp_path / "home" / "runs" / "a"
            folder.mkdir(parents=True)
            (folder / "config.yaml").write_text(dump_yaml(with_absolute_paths(call.config)), encoding="utf-8")
    for again in (call, parse_command("train", "", ["--resume", str(folder)])):
        assert again.resume == str(folder)
        assert again.config.data.train == [str(unpacked / "x.csv")]
        assert again.config.model.name == str(unpacked / "tiny")
