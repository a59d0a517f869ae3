"""A sweep as Ray's dashboard and Prometheus see it, while it runs and afterwards."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.running import ROOT, Program

PROMETHEUS = shutil.which("prometheus")
# One trial, long enough to be looked at; it is stopped then.
SWEEP = (
    "python -m raytrain_bert.tune --data.train reviews.csv --model.name tiny --train.precision fp32 "
    "--train.global-batch-size 8 --train.num-epochs 500 --search.optim.learning-rate grid:2e-3 --scaling.dashboard "
    "--output.name seen"
)


@pytest.fixture
def ray_files() -> Iterator[Path]:
    """A folder for Ray's own files; sockets want a short path."""
    with tempfile.TemporaryDirectory(prefix="rb", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def sweep(workshop: Path, ray_files: Path) -> Iterator[Program]:
    """A sweep that runs, with a dashboard."""
    program = Program(SWEEP, workshop, extra={"RAY_TMPDIR": str(ray_files), "RAY_metrics_report_interval_ms": "1000"})
    program.wait_until(lambda: "best so far" in program.stdout_path.read_text(encoding="utf-8"))
    yield program
    program.kill()
    program.wait()


def get(url: str, token: str | None = None) -> Any:
    """JSON from this address on this machine."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
        return json.load(answer)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def prometheus(sweep: Program, ray_files: Path, tmp_path: Path) -> Iterator[str]:
    """The address of a Prometheus with the configuration of deploy/, which scrapes more often."""
    if PROMETHEUS is None:
        pytest.skip("Prometheus is not installed (Debian's package prometheus)")
    # Ray writes it twice; the one that stays where it is from session to session is what deploy/ names.
    targets = min(ray_files.rglob("prom_metrics_service_discovery.json"), key=lambda path: len(path.parts))
    config = (ROOT / "deploy" / "prometheus.yml").read_text(encoding="utf-8")
    config = config.replace("/tmp/ray/prom_metrics_service_discovery.json", str(targets)).replace(": 5s", ": 1s")
    assert str(targets) in config
    (tmp_path / "prometheus.yml").write_text(config, encoding="utf-8")
    port = free_port()
    words = [PROMETHEUS, f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*words, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(20)


def asked(address: str, query: str) -> list[Any]:
    """What Prometheus answers."""
    found: list[Any] = get(f"{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}")["data"]["result"]
    return found


def has_figures(address: str) -> bool:
    try:
        return bool(asked(address, 'ray_raytrain_bert_best_score{sweep="seen"}'))
    except OSError:  # it is still starting
        return False


def test_jobs_runs_actors_and_figures_are_named_and_right(sweep: Program, prometheus: str, workshop: Path) -> None:
    told = sweep.stdout_path.read_text(encoding="utf-8")
    match = re.search(r"^dashboard +(http://127\.0\.0\.1:\d+) .*ray get-auth-token", told, re.MULTILINE)
    assert match is not None
    address, token = match[1], (workshop / "home" / ".ray" / "auth_token").read_text(encoding="ascii").strip()
    (job,) = get(f"{address}/api/jobs/", token)
    assert job["metadata"] == {"job_name": "sweep seen"}
    assert "raytrain_bert.tune" in job["entrypoint"]
    actors = get(f"{address}/logical/actors", token)["data"]["actors"].values()
    (trial,) = (actor for actor in actors if actor["actorClass"] == "Trial")
    assert trial["reprName"] == "0001 learning_rate 0.002 (sweep seen)"
    sweep.wait_until(lambda: has_figures(prometheus), 60)
    labels = '{sweep="seen",run="0001 learning_rate 0.002"}'
    (rate,) = asked(prometheus, f"ray_raytrain_bert_learning_rate{labels}")
    assert 0 < float(rate["value"][1]) <= 2e-3
    (best,) = asked(prometheus, f"ray_raytrain_bert_best_score{labels}")
    scores = (workshop / "runs" / "seen" / "trials" / "0001" / "metrics.jsonl").read_text(encoding="utf-8")
    recorded = [json.loads(line).get("accuracy") for line in scores.splitlines()]
    assert any(value is not None and value == pytest.approx(float(best["value"][1])) for value in recorded)
    for name in ("step", "loss", "rows_per_second", "padding_fraction", "step_seconds", "straggler_gap_seconds"):
        assert asked(prometheus, f"ray_raytrain_bert_{name}{labels}"), name


def test_training_runs_are_listed(workshop: Path) -> None:
    """Ray's list of training runs; with workers, a run is one (RAY_TRAIN_ENABLE_STATE_TRACKING)."""
    flags = "--scaling.num-workers 1 --train.num-epochs 500 --scaling.dashboard --output.name listed"
    command = f"python -m raytrain_bert.train --data.train reviews.csv --model.name tiny --train.precision fp32 {flags}"
    program = Program(command, workshop)
    try:
        program.wait_until(lambda: "accuracy" in program.stdout_path.read_text(encoding="utf-8"))
        match = re.search(r"^dashboard +(\S+)", program.stdout_path.read_text(encoding="utf-8"), re.MULTILINE)
        assert match is not None
        token = (workshop / "home" / ".ray" / "auth_token").read_text(encoding="ascii").strip()
        (run,) = get(f"{match[1]}/api/train/v2/runs/v1", token)["train_runs"]
        assert (run["name"], run["status"]) == ("listed", "RUNNING")
        assert len(run["attempts"][-1]["workers"]) == 1
    finally:
        program.kill()
        program.wait()
