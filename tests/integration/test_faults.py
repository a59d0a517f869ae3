"""Runs that break: an error on one worker, a worker that stands still, a model that diverges."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.integration.conftest import OWN_TEXT, TINY, TRAIN, done
from tests.integration.running import Ended, Program, checkpoints, metrics, processes_of, run, state
from tests.reviews import reviews, write_csv
from tests.tiny import VOCABULARY, tiny_bert

BAD_ROW = 123
TWO = "--scaling.num-workers 2 --model.dropout 0"


def test_an_error_on_one_worker_ends_the_run_with_worker_step_and_row(tmp_path: Path) -> None:
    rows = reviews(300, seed=5)
    rows[BAD_ROW - 1]["text"] += " a9"  # its last token is one more than the model has embeddings
    write_csv(tmp_path / "reviews.csv", rows)
    tiny_bert(tmp_path / "tiny", vocab_size=len(VOCABULARY) - 1)
    command = f"{OWN_TEXT} {TINY} {TWO} --data.validation reviews.csv --data.test-fraction 0 --output.name fault"
    program = Program(command, tmp_path)
    run_folder = tmp_path / "runs" / "fault"
    program.wait_until(lambda: (run_folder / "metrics.jsonl").exists() or program.process.poll() is not None)
    ended = program.wait(60)
    assert ended.returncode == 1, ended.told()
    told = ended.stderr.splitlines()
    assert told[0] == "fault: IndexError: index out of range in self"
    where = re.search(r"worker [01] \(.+, process \d+\), step (\d+); rows of the batch: (.+)", ended.stderr)
    assert where is not None
    assert f"reviews.csv row {BAD_ROW}" in where[2]
    assert int(where[1]) == len(metrics(run_folder, "train")) + 1
    # What the program raised is raised again by every other try: there is none.
    assert "going on" not in ended.stdout
    error = (run_folder / "logs" / "error.txt").read_text(encoding="utf-8")
    assert "Traceback (most recent call last)" in error
    assert "in train_step" in error
    assert state(run_folder)["status"] == "failed"
    assert ended.left_over == ()


@pytest.fixture(scope="module")
def stopped(workshop: Path) -> tuple[Ended, int]:
    """One of two workers stands still (SIGSTOP); the other one's patience is a quarter of a minute."""
    endless = "--train.num-epochs 500 --scaling.timeout-minutes 0.25 --checkpoint.every-steps 20 --output.name stopped"
    program = Program(f"{OWN_TEXT} {TINY} {TWO} {endless}", workshop)
    run_folder = workshop / "runs" / "stopped"
    program.wait_until(lambda: len(checkpoint_folders(run_folder)) > 1)
    workers = {worker["rank"]: worker["pid"] for worker in state(run_folder)["workers"]}
    assert set(workers.values()) <= set(processes_of(program.marker))
    os.kill(workers[1], signal.SIGSTOP)
    return program.wait(150), workers[1]


def checkpoint_folders(run_folder: Path) -> list[Path]:
    return list((run_folder / "checkpoints").glob("step-*"))


def test_a_worker_that_stands_still_is_named(stopped: tuple[Ended, int]) -> None:
    ended, pid = stopped
    assert ended.returncode == 1, ended.told()
    assert re.search(r"^fault: worker 0 \(.+\), step \d+: waited 0\.25 min for another worker", ended.stderr), (
        ended.told()
    )
    assert re.search(rf"worker 1 \(.+, process {pid}\) has given no sign of life for \d+ s, in step \d+", ended.stderr)
    assert ended.left_over == ()


def test_a_failed_run_leaves_whole_checkpoints_only(stopped: tuple[Ended, int]) -> None:
    ended, _ = stopped
    run_folder = Path(re.findall(r"^run folder +(/.+)$", ended.stdout, re.MULTILINE)[-1])
    assert checkpoints(run_folder)  # and nothing else lies beside them
    assert not list(run_folder.rglob("*.tmp"))


def test_a_model_that_diverges_ends_with_step_rows_and_what_to_change(workshop: Path) -> None:
    alone = "--scaling.num-workers 0 --scaling.cpus-per-worker 1 --output.name diverged"
    ended = run(f"{OWN_TEXT} {TINY} --optim.learning-rate 1e30 {alone}", workshop)
    assert ended.returncode == 2, ended.told()
    assert re.search(r"^training error: Step \d+: the loss is (nan|inf)", ended.stderr), ended.told()
    assert "reviews.csv row " in ended.stderr
    assert "--optim.learning-rate" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert state(workshop / "runs" / "diverged")["status"] == "failed"


def test_resume_with_another_number_of_workers_is_said_in_a_line(interrupted: Ended, saved_at: int) -> None:
    folder = interrupted.folder / "runs" / "interrupted-copy"
    settings = "--scaling.num-workers 0 --scaling.cpus-per-worker 1"
    ended = done(run(f"{TRAIN} --resume {folder} {settings}", interrupted.folder))
    told = f"going on after step {saved_at:,} with 1 worker in place of 2: the same rows a step, the same curve"
    assert told in ended.stdout.splitlines()
    run_state = state(folder)
    rows = run_state["rows"]["train"]
    assert [receipt["rows_seen"] for receipt in run_state["receipts"]] == [rows, rows]
    steps = [record["step"] for record in metrics(folder, "train")]
    assert steps == list(range(1, run_state["step"] + 1))
