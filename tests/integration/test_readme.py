"""Every command of the README is run, as it stands there.

What the tests put behind a command makes it short, and flags that come later win: a tiny model in place of MiniLM and
bert-base-uncased, two epochs, batches of four. The command without any flag is run in full by test_bundled.py.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from raytrain_bert.config.load import flag_of, load_config, settings_of
from raytrain_bert.config.schema import Config
from tests.integration.conftest import EXPERIMENT, OWN_TEST, OWN_TEXT, PairRuns
from tests.integration.running import ROOT, Ended, run, state, strict_json

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\w*\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(\S*python3?|raytrain-bert|make|\S*pip) .*")

SET_UP = ["python3 -m venv .venv", '.venv/bin/pip install -c constraints.txt -e ".[dev]"']
MADE = {"make train": ".venv/bin/python -m raytrain_bert.train", "make test": ".venv/bin/python -m pytest"}
TWO_GPUS = "python -m raytrain_bert.train --config experiments/two_gpus.yaml --data.train reviews.csv"
PRINT_CONFIG = "python -m raytrain_bert.train --print-config"
HELP = "python -m raytrain_bert.train --help"
PREDICT = 'python -m raytrain_bert.predict RUN --text "Shares rose after the bank\'s results."'
DRILL = "raytrain-bert drill experiments/bbc_news.yaml"  # run by test_drill.py
RESUME = "python -m raytrain_bert.train --resume RUN"
SWEEP = "python -m raytrain_bert.tune --config experiments/bbc_news_sweep.yaml"
SUBMIT = "raytrain-bert submit train --config experiments/bbc_news.yaml --output.name bbc --auto-resume"
DOCTOR = "raytrain-bert doctor --data.train reviews.csv"  # run by test_doctor.py
# Run by test_sweep.py.
OWN_SWEEP = "python -m raytrain_bert.tune --data.train reviews.csv --search.optim.learning-rate loguniform:1e-5,5e-4"
COVERED = [
    *SET_UP,
    *MADE,
    *MADE.values(),
    OWN_TEXT,
    OWN_TEST,
    EXPERIMENT,
    TWO_GPUS,
    PRINT_CONFIG,
    HELP,
    PREDICT,
    RESUME,
    DRILL,
    SWEEP,
    OWN_SWEEP,
    DOCTOR,
    SUBMIT,  # run by test_jobs.py
]


def is_run_as(command: str, ended: Ended) -> bool:
    """Whether a command that was run is this one of the README, with settings behind it."""
    words = tuple(shlex.split(command))
    return ended.words[: len(words)] == words


def test_every_command_of_the_readme_has_its_test() -> None:
    lines = [line.partition("#")[0].strip() for block in BLOCKS for line in block.splitlines()]
    commands = [line for line in lines if COMMAND.fullmatch(line)]
    assert sorted(commands) == sorted(COVERED)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("target", MADE)
def test_make_does_what_the_readme_says_in_plain_pip_and_python(target: str) -> None:
    words = ["make", "--dry-run", "--always-make", "--no-print-directory", "-C", str(ROOT), *target.split()[1:]]
    told = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    assert [line for line in told if not line.startswith("touch ")] == [*SET_UP, MADE[target]]


def test_own_text(pair_runs: PairRuns) -> None:
    ended = pair_runs(2)
    assert is_run_as(OWN_TEXT, ended)
    assert state(ended.run_folder)["status"] == "finished"


def test_own_text_with_a_test_file_and_a_model_by_name(whole: Ended) -> None:
    assert is_run_as(OWN_TEST, whole)
    assert state(whole.run_folder)["status"] == "finished"


@pytest.mark.bundled
def test_an_experiment_with_two_settings_changed(workshop: Path) -> None:
    ended = run(f"{EXPERIMENT} --model.name tiny --train.max-steps 8 --output.name bbc", workshop)
    assert ended.returncode == 0, ended.told()
    assert re.search(r"^devices +CPU, 2 workers", ended.stdout, re.MULTILINE)
    config = load_config({}, ended.run_folder / "config.yaml")
    assert (config.optim.learning_rate, config.scaling.num_workers) == (3e-5, 2)  # flags win over the file,
    assert (config.data.max_length, config.train.global_batch_size) == (96, 16)  # the file over the defaults
    assert sum(state(ended.run_folder)["rows"].values()) == 2225


@pytest.mark.bundled
def test_a_sweep_from_a_file(workshop: Path) -> None:
    short = "--model.name tiny --train.max-steps 8 --sweep.num-trials 2 --output.name bbc_sweep"
    ended = run(f"{SWEEP} {short}", workshop)
    assert ended.returncode == 0, ended.told()
    lines = (workshop / "runs" / "bbc_sweep" / "trials.jsonl").read_text(encoding="utf-8").splitlines()
    for trial in map(strict_json, lines):
        assert 1e-5 <= trial["sample"]["optim.learning_rate"] <= 5e-4
        assert trial["sample"]["train.global_batch_size"] in (16, 32)
    assert len(lines) == 2


def test_print_config_prints_what_a_run_without_flags_would_use(workshop: Path, tmp_path: Path) -> None:
    ended = run(PRINT_CONFIG, workshop)
    assert (ended.returncode, ended.stderr) == (0, "")
    (tmp_path / "printed.yaml").write_text(ended.stdout, encoding="utf-8")
    assert load_config({}, tmp_path / "printed.yaml") == load_config({}, ROOT / "experiments" / "bbc_news.yaml")
    # "`raytrain-bert train` is `python -m raytrain_bert.train`."
    assert run(PRINT_CONFIG.replace("python -m raytrain_bert.train", "raytrain-bert train"), workshop).stdout == (
        ended.stdout
    )


def test_help_names_every_setting(workshop: Path) -> None:
    ended = run(HELP, workshop)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert {flag_of(key) for key, _ in settings_of(Config)} <= set(re.findall(r"--[\w.-]+", ended.stdout))


def test_two_gpus_are_refused_where_there_are_none(workshop: Path) -> None:
    """On a machine with two GPUs the command is run by tests/gpu."""
    ended = run(f"{TWO_GPUS} --output.storage-path elsewhere", workshop)
    assert ended.returncode == 2
    assert "2 workers with a GPU each were asked for; this machine has 0 GPUs" in ended.stderr
    assert "train on CPU with" in ended.stderr.replace("Train", "train")
    assert ended.seconds < 15


def test_run_folder_is_as_described(whole: Ended) -> None:
    (block,) = (block for block in BLOCKS if block.startswith("runs/"))
    names = [line.split()[0] for line in block.splitlines()[1:]]
    assert sorted(names) == sorted(path.name + ("/" if path.is_dir() else "") for path in whole.run_folder.iterdir())


def test_predict_tells_a_label_and_its_probability(whole: Ended) -> None:
    ended = run(PREDICT.replace("RUN", "runs/whole"), whole.folder)
    assert (ended.returncode, ended.stderr) == (0, "")
    (line,) = ended.stdout.splitlines()
    told = strict_json(line)
    assert told["label"] in state(whole.run_folder)["labels"]
    assert 1 / 3 < told["probability"] <= 1
    assert told["text"] == "Shares rose after the bank's results."


def test_resume_goes_on_with_an_interrupted_run(interrupted: Ended, resumed: Ended) -> None:
    assert interrupted.returncode == 130
    assert resumed.words == tuple(shlex.split(RESUME.replace("RUN", "runs/interrupted")))
    assert state(resumed.run_folder)["status"] == "finished"
