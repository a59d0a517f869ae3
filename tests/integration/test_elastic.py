"""Elastic training on a real cluster: a node is lost, another one comes, and the curve stays the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.integration.cluster import Cluster
from tests.integration.conftest import OWN_TEXT, done
from tests.integration.running import Ended, Program, metrics, run, state

EPOCHS, BATCH = 10, 16
RUN = (
    f"{OWN_TEXT} --data.test test.csv --model.name tiny --model.dropout 0 --train.precision fp32 "
    f"--train.global-batch-size {BATCH} --train.num-epochs {EPOCHS} --optim.learning-rate 2e-4 "
    "--scaling.cpus-per-worker 1"
)
# Micro batches of a row or two: the steps take long enough to lose a node in their midst; the result is the same.
SLOW = "--train.tokens-per-micro-batch 40"
ELASTIC = "--scaling.num-workers 1..2 --scaling.resize-check-seconds 3 --checkpoint.every-steps 20"

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def disturbed(workshop: Path) -> Iterator[Ended]:
    """Two workers on two nodes; one node dies; another one joins."""
    with Cluster(workshop) as cluster:
        cluster.add_node()
        command = f"{RUN} {SLOW} {ELASTIC} --scaling.address {cluster.address} --output.name elastic"
        program = Program(command, workshop, extra=cluster.extra)
        run_folder = workshop / "runs" / "elastic"

        def restarts() -> list[int]:
            """Number of workers after each restart that has come to its first step."""
            told = state(run_folder).get("restarts", []) if (run_folder / "run.json").exists() else []
            trained = (run_folder / "metrics.jsonl").exists()
            return [restart["workers"] for restart in told] if trained else []

        def step() -> int:
            return len(metrics_so_far(run_folder))

        program.wait_until(lambda: step() > 30)
        cluster.kill_node(1)
        program.wait_until(lambda: 1 in restarts(), timeout=200)
        cluster.add_node()
        program.wait_until(lambda: restarts()[-1:] == [2], timeout=200)
        yield done(program.wait())


def metrics_so_far(run_folder: Path) -> list[str]:
    """Whole lines of metrics.jsonl that are there by now."""
    try:
        return (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []


@pytest.fixture(scope="module")
def undisturbed(workshop: Path) -> Ended:
    """The same in one process, in big micro batches."""
    return done(run(f"{RUN} --scaling.num-workers 0 --output.name fixed", workshop))


def test_training_goes_on_with_the_nodes_that_are_there(disturbed: Ended) -> None:
    restarts = state(disturbed.run_folder)["restarts"]
    workers = [restart["workers"] for restart in restarts]
    assert workers[0] == 1
    assert workers[-1] == 2
    assert "with 1 worker in place of 2" in disturbed.stdout
    assert "with 2 workers in place of 1" in disturbed.stdout
    assert disturbed.left_over == ()


def test_the_curve_is_that_of_an_undisturbed_run(disturbed: Ended, undisturbed: Ended) -> None:
    ours, theirs = (metrics(ended.run_folder, "train") for ended in (disturbed, undisturbed))
    for key in ("step", "epoch", "rows", "tokens", "learning_rate"):
        assert [record[key] for record in ours] == [record[key] for record in theirs], key
    for key in ("loss", "grad_norm"):
        # Rounding grows with the steps; a row too many or too few would show in the first digits.
        np.testing.assert_allclose([r[key] for r in ours], [r[key] for r in theirs], rtol=2e-3, err_msg=key)
        first = [[record[key] for record in records[:50]] for records in (ours, theirs)]
        np.testing.assert_allclose(*first, rtol=1e-5, err_msg=key)


def test_no_row_is_lost_or_repeated(disturbed: Ended) -> None:
    rows = state(disturbed.run_folder)["rows"]["train"]
    receipts = metrics(disturbed.run_folder, "epoch")
    assert [receipt["epoch"] for receipt in receipts] == list(range(EPOCHS))
    assert all((r["rows_seen"], r["repeated"], r["is_whole"]) == (rows, 0, True) for r in receipts)
    assert f"{rows}/{rows} rows in each of {EPOCHS} epochs, each once" in disturbed.stdout
    steps = [record["step"] for record in metrics(disturbed.run_folder, "train")]
    assert steps == list(range(1, len(steps) + 1))
