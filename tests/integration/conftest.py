"""Runs that more than one test looks at. Each costs the start of Ray, so each is made once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.running import ROOT, Ended, Program, metrics, run
from tests.reviews import pairs, reviews, write_csv
from tests.tiny import tiny_bert

PairRuns = Callable[[int], Ended]

# The README's own commands; what is put behind them makes the model tiny and the run short.
TRAIN = "python -m raytrain_bert.train"
OWN_TEXT = f"{TRAIN} --data.train reviews.csv"
OWN_TEST = f"{TRAIN} --data.train reviews.csv --data.test test.csv --model.name bert-base-uncased"
EXPERIMENT = f"{TRAIN} --config experiments/bbc_news.yaml --optim.learning-rate 3e-5 --scaling.num-workers 2"

TINY = "--model.name tiny --train.precision fp32 --train.global-batch-size 4 --optim.learning-rate 2e-3"
REVIEWS = f"{OWN_TEST} {TINY} --train.num-epochs 2 --scaling.num-workers 2"
PAIRS = f"{OWN_TEXT} {TINY} --model.pooling last --model.dropout 0 --train.num-epochs 3"
# Nothing is better by 1 than the first accuracy: three more validations end the run.
STOPPED_EARLY = (
    "--train.validate-every-steps 10 --train.early-stopping-patience 3 --train.early-stopping-min-delta 1 "
    "--checkpoint.every-steps 4 --checkpoint.num-to-keep 1"
)


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with reviews.csv, test.csv, experiments/ and a tiny model."""
    folder = tmp_path_factory.mktemp("reviews")
    # 891 rows leave 801 or so to training: 200 whole batches, and a last one that two workers cannot share.
    write_csv(folder / "reviews.csv", reviews(891, seed=0))
    write_csv(folder / "test.csv", reviews(101, seed=1))
    tiny_bert(folder / "tiny")
    (folder / "experiments").symlink_to(ROOT / "experiments")
    return folder


@pytest.fixture(scope="session")
def pair_workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder whose reviews.csv holds pairs of texts."""
    folder = tmp_path_factory.mktemp("pairs")
    write_csv(folder / "reviews.csv", pairs(251, seed=0))
    tiny_bert(folder / "tiny")
    return folder


@pytest.fixture(scope="session")
def whole(workshop: Path) -> Ended:
    """Two CPU workers, dropout on, to the end."""
    return done(run(f"{REVIEWS} --output.name whole", workshop))


@pytest.fixture(scope="session")
def interrupted(workshop: Path) -> Ended:
    """The same run as `whole`, ended by Ctrl-C in the middle of its first epoch; a copy is kept as it was left."""
    program = Program(f"{REVIEWS} --output.name interrupted", workshop)
    run_folder = workshop / "runs" / "interrupted"
    program.wait_until(lambda: (run_folder / "metrics.jsonl").exists())
    program.press_ctrl_c()
    ended = program.wait()
    shutil.copytree(run_folder, run_folder.with_name("interrupted-copy"))
    return ended


@pytest.fixture(scope="session")
def saved_at(interrupted: Ended) -> int:
    """Step up to which the interrupted run had got, before it was resumed."""
    assert interrupted.returncode == 130, interrupted.told()
    return int(metrics(interrupted.run_folder)[-1]["step"])


@pytest.fixture(scope="session")
def resumed(interrupted: Ended, saved_at: int) -> Ended:
    """The interrupted run, gone on with by the command that it printed."""
    return done(run(interrupted.stdout.splitlines()[-1].strip(), interrupted.folder))


@pytest.fixture(scope="session")
def pair_runs(pair_workshop: Path) -> PairRuns:
    """Training on pairs of texts with a pooled head, by number of workers: 0, or 2 with --quiet."""
    ended: dict[int, Ended] = {}

    def get(workers: int) -> Ended:
        if workers not in ended:
            settings = f"--scaling.num-workers {workers} --scaling.cpus-per-worker 1 --output.name workers-{workers}"
            quiet = "--quiet" if workers else ""
            ended[workers] = done(run(f"{PAIRS} {STOPPED_EARLY} {settings} {quiet}", pair_workshop))
        return ended[workers]

    return get


def done(ended: Ended) -> Ended:
    """A command that must have ended well."""
    assert ended.returncode == 0, ended.told()
    return ended
