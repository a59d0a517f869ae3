"""doctor as the README writes it, and a dry run: nothing of either is left."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.integration.conftest import OWN_TEXT, TINY
from tests.integration.running import Ended, run
from tests.integration.test_readme import DOCTOR, OWN_SWEEP


@pytest.fixture(scope="module")
def looked(workshop: Path) -> Ended:
    return run(f"{DOCTOR} {TINY} --json", workshop)


def test_doctor_times_the_job_and_leaves_nothing(looked: Ended, workshop: Path) -> None:
    assert looked.returncode == 0, looked.told()
    checks = {check["name"]: check for check in json.loads(looked.stdout)["checks"]}
    assert {"packages", "GPUs", "CPUs", "memory", "disk", "token", "ports"} <= set(checks)
    assert {"cluster", "workers", "clocks", "versions", "storage", "all-reduce", "timing"} <= set(checks)
    timing = checks["timing"]["figures"]
    assert timing["rows_per_second"] > 0
    assert timing["seconds_of_the_whole_run"] > timing["seconds_to_start"] > 0
    assert timing["peak_bytes"] > 10**8
    assert checks["all-reduce"]["figures"]["bytes_per_second"] > 10**6
    assert not list((workshop / "runs").glob(".doctor*"))
    assert looked.left_over == ()


def test_a_fault_is_told_with_its_remedy_and_the_exit_code(workshop: Path) -> None:
    ended = run(f"{DOCTOR} {TINY} --scaling.num-workers 9 --no-scaling.use-gpu", workshop)
    assert ended.returncode == 2, ended.told()
    assert re.search(r"^fault +workers +9 workers .* asked for", ended.stdout, re.MULTILINE)
    assert "1 fault" in ended.stdout
    assert "timing" not in ended.stdout


def test_a_dry_run_shows_everything_and_leaves_nothing(workshop: Path) -> None:
    ended = run(f"{OWN_TEXT} {TINY} --scaling.num-workers 2 --output.name dry --dry-run", workshop)
    assert ended.returncode == 0, ended.told()
    for line in (r"^labels +\d:", r"^workers +2, each with 1 CPU", r"^steps +\d+, \d+ an epoch"):
        assert re.search(line, ended.stdout, re.MULTILINE), line
    assert not (workshop / "runs" / "dry").exists()
    ended = run(f"{OWN_SWEEP} {TINY} --output.name dry --dry-run", workshop)
    assert ended.returncode == 0, ended.told()
    assert re.search(r"^searching +random, 8 trials", ended.stdout, re.MULTILINE)
    assert not (workshop / "runs" / "dry").exists()
