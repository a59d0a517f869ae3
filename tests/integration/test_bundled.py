"""The promise of the first command: no flag, no download, a good classifier in minutes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import TRAIN
from tests.integration.running import Program, metrics, state

pytestmark = pytest.mark.bundled

SECONDS_TO_FIRST_SIGN = 5


@pytest.mark.timeout(1000)
def test_bbc_news_without_any_flag(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    program = Program(TRAIN, tmp_path)
    program.wait_until(lambda: program.stdout_path.stat().st_size > 0, timeout=SECONDS_TO_FIRST_SIGN)
    ended = program.wait(900)
    record_property("wall_seconds", round(ended.seconds, 1))
    assert ended.returncode == 0, ended.told()
    assert ended.stderr == ""
    labels = r"^labels +5: business 510, entertainment 386, politics 417, sports 511, tech 401$"
    assert re.search(labels, ended.stdout, re.MULTILINE), ended.told()
    run_state = state(ended.run_folder)
    record_property("test_accuracy", run_state["test"]["accuracy"])
    record_property("seconds", run_state["seconds"])
    assert ended.run_folder.parent == tmp_path / "runs"
    assert sum(run_state["rows"].values()) == 2225
    assert sum(record["rows"] for record in metrics(ended.run_folder, "train")) == run_state["rows"]["train"]
    assert run_state["test"]["rows_seen"] == run_state["rows"]["test"]
    assert run_state["test"]["accuracy"] >= 0.95
    assert ended.left_over == ()
