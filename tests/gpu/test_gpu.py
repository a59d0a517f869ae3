"""On real GPUs: NCCL, every precision, and the losses of a CPU run. Skipped where there are too few."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.running import ROOT, Ended, metrics, run, state
from tests.reviews import reviews, write_csv
from tests.tiny import tiny_bert

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="no CUDA device on this machine")]

RUN = (
    "python -m raytrain_bert.train --data.train reviews.csv --model.name tiny --model.dropout 0 "
    "--train.global-batch-size 16 --train.num-epochs 2 --optim.learning-rate 2e-3 --output.name {name} {more}"
)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    write_csv(folder / "reviews.csv", reviews(401, seed=0))
    tiny_bert(folder / "tiny")
    return folder


def train(workshop: Path, name: str, more: str) -> Ended:
    ended = run(RUN.format(name=name, more=more), workshop, gpus=True)
    assert ended.returncode == 0, ended.told()
    return ended


def losses(ended: Ended) -> list[float]:
    return [record["loss"] for record in metrics(ended.run_folder, "train")]


@pytest.fixture(scope="module")
def on_cpu(workshop: Path) -> list[float]:
    return losses(train(workshop, "cpu", "--no-scaling.use-gpu --scaling.num-workers 1 --train.precision fp32"))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_one_gpu(workshop: Path, on_cpu: list[float], precision: str) -> None:
    ended = train(workshop, precision, f"--scaling.num-workers 1 --scaling.use-gpu --train.precision {precision}")
    assert torch.cuda.get_device_name(0) in ended.stdout
    tolerance = 1e-3 if precision == "fp32" else 0.2
    assert losses(ended) == pytest.approx(on_cpu, rel=tolerance, abs=tolerance)
    assert state(ended.run_folder)["test"]["rows_seen"] == state(ended.run_folder)["rows"]["test"]


def test_gradient_checkpointing_and_this_process(workshop: Path, on_cpu: list[float]) -> None:
    more = "--scaling.num-workers 0 --scaling.use-gpu --train.precision fp32 --model.gradient-checkpointing"
    assert losses(train(workshop, "here", more)) == pytest.approx(on_cpu, rel=1e-3, abs=1e-3)


@pytest.mark.skipif(GPUS < 2, reason="fewer than two CUDA devices")
def test_two_gpus_give_the_losses_of_one_cpu(workshop: Path, on_cpu: list[float]) -> None:
    more = "--scaling.num-workers 2 --scaling.use-gpu --train.precision fp32"
    ended = train(workshop, "two", more)
    assert "2 x " in ended.stdout
    assert losses(ended) == pytest.approx(on_cpu, rel=1e-3, abs=1e-3)


@pytest.mark.skipif(GPUS < 2, reason="fewer than two CUDA devices")
def test_the_readme_command_for_two_gpus(workshop: Path) -> None:
    command = f"python -m raytrain_bert.train --config {ROOT}/experiments/two_gpus.yaml --data.train reviews.csv"
    short = "--model.name tiny --data.labels none --data.max-length 64 --output.name readme"
    ended = run(f"{command} {short}", workshop, gpus=True)
    assert ended.returncode == 0, ended.told()
    assert "2 x " in ended.stdout
    assert state(ended.run_folder)["status"] == "finished"
