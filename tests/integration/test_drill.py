"""The drill: every fault is survived, and the curve is that of the undisturbed run, bit for bit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.integration.running import ROOT, Ended, run
from tests.integration.test_readme import DRILL

SHORT = (
    "--steps 120 --data.train reviews.csv --data.test test.csv --model.name tiny --model.pooling native "
    "--model.dropout 0.1 --train.precision fp32 --train.global-batch-size 4 --scaling.num-workers 2"
)


@pytest.fixture(scope="module")
def drilled(workshop: Path) -> Ended:
    """A worker killed, the driver killed, SIGTERM; six starts of Ray."""
    assert (workshop / "experiments").resolve() == ROOT / "experiments"
    return run(f"{DRILL} {SHORT}", workshop, timeout=800)


@pytest.mark.timeout(900)
def test_everything_is_survived_bit_for_bit_with_dropout(drilled: Ended) -> None:
    assert drilled.returncode == 0, drilled.told()
    (folder,) = (drilled.folder / "runs").glob("drill-*")
    outcomes = json.loads((folder / "drill.json").read_text(encoding="utf-8"))["outcomes"]
    assert [outcome["fault"] for outcome in outcomes] == ["a worker killed", "the driver killed", "SIGTERM"]
    for outcome in outcomes:
        assert outcome["survived"], outcome
        assert (outcome["lost"], outcome["difference"]) == (0, 0), outcome
        assert 0 < outcome["seconds"] < 300
    # SIGTERM saves the very step; what is killed goes on from the checkpoint before.
    assert outcomes[2]["repeated"] == 0
    assert 0 <= outcomes[1]["repeated"] <= 120
    assert 0 <= outcomes[0]["repeated"] <= 120
    assert drilled.left_over == ()


def test_the_table_has_a_line_for_each_fault(drilled: Ended) -> None:
    for fault in ("a worker killed", "the driver killed", "SIGTERM"):
        assert re.search(rf"^{fault} +yes +\d+ +0 +bit for bit +\d.*", drilled.stdout, re.MULTILINE), drilled.told()
    assert drilled.stderr == ""


def test_what_cannot_be_drilled_is_told_before_anything_starts(workshop: Path) -> None:
    ended = run(f"{DRILL} --steps 5", workshop)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "at least 10" in ended.stderr
    ended = run(f"{DRILL} --optim.lerning-rate 1", workshop)
    assert ended.returncode == 2
    assert "did you mean --optim.learning-rate" in ended.stderr
