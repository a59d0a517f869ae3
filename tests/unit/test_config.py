"""Defaults < YAML < flags; every problem at once; nearest matches."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from raytrain_bert.command import parse_command
from raytrain_bert.config.errors import ConfigError
from raytrain_bert.config.load import dump_yaml, flag_of, load_config, settings_of, with_absolute_paths
from raytrain_bert.config.schema import Config
from raytrain_bert.config.sweep import SweepConfig
from raytrain_bert.sweep.space import read_space

EXPERIMENTS = sorted((Path(__file__).parents[2] / "experiments").glob("*.yaml"))


def parse(*words: str) -> Config:
    return parse_command("train", "", words).config


def test_flags_beat_yaml_and_yaml_beats_defaults(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("train: {num_epochs: 7, seed: 5}\noptim: {learning-rate: 3e-5}\n")
    config = parse("--config", str(path), "--train.seed", "6")
    assert (config.train.num_epochs, config.train.seed) == (7, 6)
    assert config.optim.learning_rate == 3e-5
    assert config.train.global_batch_size == Config().train.global_batch_size


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.name)
def test_every_experiment_loads(path: Path) -> None:
    config = load_config({}, path, root=SweepConfig)
    read_space(config.search, config.base())
    assert config.search or load_config({}, path) == config.base()


def test_two_gpus_experiment_is_the_case_of_two_workers_with_a_gpu_each() -> None:
    config = load_config({}, EXPERIMENTS[0].with_name("two_gpus.yaml"))
    assert (config.scaling.num_workers, config.scaling.use_gpu) == (2, True)


def test_without_flags_the_bundled_experiment_runs() -> None:
    assert parse() == load_config({}, EXPERIMENTS[0].with_name("bbc_news.yaml"))


def test_own_data_does_not_inherit_the_bundled_experiment() -> None:
    assert parse("--data.train", "x.csv").data.max_length is None


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("optim: {learning_rat: 1}\ntrian: {seed: 1}\nmodel: {dropout: 2}\n")
    with pytest.raises(ConfigError) as caught:
        parse("--config", str(path), "--train.num-epochs", "x", "--scaling.num-worker", "2")
    message = str(caught.value)
    for part in (
        "optim.learning_rat: unknown setting; did you mean optim.learning_rate?",
        "trian: unknown section; did you mean train?",
        "model.dropout:",
        "train.num_epochs:",
        "--scaling.num-worker: unknown flag; did you mean --scaling.num-workers?",
    ):
        assert part in message
    assert message.startswith("5 problems:")


def test_a_setting_in_the_wrong_section_is_traced_to_the_right_one() -> None:
    with pytest.raises(ConfigError, match=r"did you mean --optim\.learning-rate\?"):
        parse("--train.learning-rate", "1")


def test_paths_with_commas_and_braces_stay_whole() -> None:
    assert parse("--data.train", "a,b.csv", "--data.train", "{x}.csv").data.train == ["a,b.csv", "{x}.csv"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--scaling.use-gpu"], True),
        (["--no-scaling.use-gpu"], False),
        (["--scaling.use-gpu=false"], False),
        (["--scaling.use_gpu", "true"], True),
        ([], None),
    ],
)
def test_boolean_flags(words: list[str], expected: bool | None) -> None:
    assert parse(*words).scaling.use_gpu is expected


def test_none_unsets_a_setting() -> None:
    assert parse("--optim.max-grad-norm", "none").optim.max_grad_norm is None
    assert parse("--data.train", "x.csv", "--data.test", "none").data.test is None


def test_none_is_a_value_where_the_schema_names_it() -> None:
    named = [key for key, field in settings_of(SweepConfig) if "'none'" in str(field.annotation)]
    assert "sweep.scheduler" in named
    for key in named:
        section, _, name = key.partition(".")
        config = load_config({"data.train": ["x.csv"], key: "none"}, root=SweepConfig)
        assert getattr(getattr(config, section), name) == "none"


def test_every_setting_has_a_flag_and_a_description() -> None:
    for key, field in settings_of(Config):
        assert field.description, key
        assert field.description.endswith("."), key
        assert flag_of(key).islower()


def test_resolved_configuration_loads_back_the_same(tmp_path: Path) -> None:
    config = parse("--optim.learning-rate", "3e-5", "--data.labels", "yes", "--data.labels", "no")
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(config), encoding="utf-8")
    assert load_config({}, path) == config


def test_print_config_prints_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    from raytrain_bert.train import main

    assert main(["--print-config", "--train.seed", "3"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["train"]["seed"] == 3


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", "data: 3\n"])
def test_broken_yaml_is_a_readable_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.yaml"):
        load_config({}, path)


def test_a_misspelt_file_is_told_with_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "news.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"Did you mean .*news\.yaml"):
        load_config({}, tmp_path / "new.yaml")


def test_resume_refuses_settings_that_change_the_result(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump_yaml(Config()))
    with pytest.raises(ConfigError, match=r"optim\.learning_rate"):
        parse("--resume", str(tmp_path), "--optim.learning-rate", "1")
    assert parse("--resume", str(tmp_path), "--scaling.num-workers", "1").scaling.num_workers == 1


def test_help_needs_neither_torch_nor_ray() -> None:
    code = (
        "import sys\nfrom raytrain_bert.train import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules), 'heavy import'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--optim.learning-rate" in done.stdout


def test_every_folder_of_the_package_is_shipped() -> None:
    root = Path(__file__).parents[2]
    listed = re.findall(
        r'^  "(raytrain_bert[\w.]*)",$', (root / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    folders = {path.parent.relative_to(root).as_posix() for path in (root / "raytrain_bert").rglob("*.py")}
    assert {name.replace(".", "/") for name in listed} == folders | {"raytrain_bert/experiments"}
    data = re.search(r'^"raytrain_bert.sweep" = (\[.*\])$', (root / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert data is not None
    beside = [path.name for path in (root / "raytrain_bert/sweep").iterdir() if path.suffix not in (".py", "")]
    assert sorted(re.findall(r'"(.*?)"', data[1])) == sorted(beside)


@pytest.mark.parametrize("uri", ["s3://key:secret@bucket/x.csv", "s3://bucket/x.csv?secret_key=abc"])
def test_credentials_in_a_path_are_refused_and_not_repeated(uri: str) -> None:
    with pytest.raises(ConfigError, match="credentials") as caught:
        parse("--data.train", uri)
    assert "secret@" not in str(caught.value)
    assert "abc" not in str(caught.value)


def test_infinity_is_refused() -> None:
    with pytest.raises(ConfigError, match="finite"):
        parse("--scaling.timeout-minutes", "inf")


def test_paths_are_made_absolute_and_names_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    words = ("--data.train", "x.csv", "--data.train", "hf:imdb", "--data.test", "s3://b/x.csv", "--model.name", "tiny")
    config = with_absolute_paths(parse(*words))
    assert config.data.train == [str(tmp_path / "x.csv"), "hf:imdb"]
    assert config.data.test == ["s3://b/x.csv"]
    assert config.model.name == str(tmp_path / "tiny")
    assert config.output.storage_path == str(tmp_path / "runs")
    assert with_absolute_paths(parse()).model.name == "bundled:all-minilm-l6-v2"
