"""Sweeps of a tiny model, run as the README writes it: the right winner, and on after a kill in another place."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.running import Ended, Program, run
from tests.integration.test_readme import OWN_SWEEP as SWEEP

SHORT = "--data.test test.csv --model.name tiny --train.precision fp32 --train.global-batch-size 8"
KEY = "optim.learning_rate"


def trials_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trials.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def swept(workshop: Path) -> Ended:
    """0 cannot learn and 1e9 gives NaN: 2e-3 must win."""
    flags = "--train.num-epochs 2 --search.optim.learning-rate grid:0,2e-3,1e9 --output.name swept"
    return run(f"{SWEEP} {SHORT} {flags}", workshop)


def test_the_trial_that_learns_wins_and_is_tested_once(swept: Ended) -> None:
    assert swept.returncode == 0, swept.told()
    folder = swept.folder / "runs" / "swept"
    still, winner, broken = trials_of(folder)
    assert (still["status"], winner["status"], broken["status"]) == ("trained", "trained", "failed")
    assert "nan" in broken["why"]
    assert winner["best_score"] > still["best_score"]
    assert [trial["effective"][KEY] for trial in (still, winner)] == [0, pytest.approx(2e-3, rel=1e-6)]
    state = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
    assert (state["status"], state["best"]["trial"], state["resources_held"]) == ("finished", 2, None)
    with_test = [path for path in (folder / "trials").iterdir() if '"kind":"test"' in text_of(path).replace(" ", "")]
    assert [path.name for path in with_test] == ["0002"]
    assert (folder / "trials" / "0002" / "model" / "model.safetensors").is_file()
    assert swept.left_over == ()


def text_of(run_folder: Path) -> str:
    path = run_folder / "metrics.jsonl"
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def test_table_page_and_best_settings_agree(swept: Ended) -> None:
    folder = swept.folder / "runs" / "swept"
    with (folder / "trials.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [float(row[KEY]) for row in rows] == [0, 2e-3, 1e9]
    best = yaml.safe_load((folder / "best.yaml").read_text(encoding="utf-8"))
    assert best["optim"]["learning_rate"] == 2e-3
    page = (folder / "sweep.html").read_text(encoding="utf-8")
    assert f'data-name="best_score" data-value="{rows[1]["best_score"]}"' in page
    assert "http-equiv" not in page


def test_a_killed_sweep_goes_on_where_it_was_in_another_place(workshop: Path, tmp_path: Path) -> None:
    flags = "--train.num-epochs 4 --search.optim.learning-rate grid:2e-3,1e-3,5e-4 --output.name killed"
    program = Program(f"{SWEEP} {SHORT} {flags}", workshop)
    folder = workshop / "runs" / "killed"

    def third_has_reported() -> bool:
        return (folder / "trials.jsonl").is_file() and len(t := trials_of(folder)) == 3 and t[2]["epoch"] is not None

    program.wait_until(third_has_reported)
    program.process.kill()
    program.wait()
    before = trials_of(folder)
    shutil.move(folder, tmp_path / "moved")
    ended = run(f"python -m raytrain_bert.tune --resume {tmp_path / 'moved'}", tmp_path)
    assert ended.returncode == 0, ended.told()
    after = trials_of(tmp_path / "moved")
    done = [trial["number"] for trial in before if trial["status"] == "trained"]
    assert done
    for number in done:
        assert after[number - 1] == before[number - 1]
        assert f"trial {number} started" not in ended.stdout
    assert [trial["status"] for trial in after] == ["trained"] * 3
    assert [trial["epoch"] for trial in after] == [4, 4, 4]


def test_mistakes_are_told_before_anything_starts(workshop: Path) -> None:
    ended = run(f"{SWEEP} {SHORT} --search.optim.lerning-rate grid:1,2", workshop)
    assert ended.returncode == 2
    assert "did you mean optim.learning_rate" in ended.stderr
    ended = run(f"{SWEEP} {SHORT} --scaling.num-workers 9 --no-scaling.use-gpu --output.name none", workshop)
    assert ended.returncode == 2
    assert "has no room" in ended.stderr
    assert ended.seconds < 15
    assert not (workshop / "runs" / "none").exists()
