"""Jobs on a Ray cluster: submitted by our command and by Ray's, followed, stopped, submitted again, refused."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.integration.cluster import Cluster, free_port
from tests.integration.conftest import TINY
from tests.integration.running import ROOT, Ended, Program, metrics, run, state
from tests.integration.test_readme import SUBMIT

TRAIN_FLAGS = f"--data.train reviews.csv --data.test test.csv {TINY} --scaling.num-workers 1"

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def job_folder(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user submits: code, data and model in one folder, with the project's runtime_env.yaml."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "raytrain_bert", folder / "raytrain_bert", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("reviews.csv", "test.csv"):
        shutil.copy(workshop / name, folder / name)
    shutil.copytree(workshop / "tiny", folder / "tiny")
    environment = yaml.safe_load((ROOT / "runtime_env.yaml").read_text(encoding="utf-8"))
    environment["excludes"].remove("*.safetensors")  # the tiny model goes along
    (folder / "runtime_env.yaml").write_text(yaml.safe_dump(environment), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def head(job_folder: Path) -> Iterator[Cluster]:
    """A head node with two CPUs and a dashboard; its home is that of the user."""
    with Cluster(job_folder, cpus=2, dashboard=True) as cluster:
        yield cluster


def submit(head: Cluster, words: str) -> Program:
    return Program(f"raytrain-bert submit --address {head.jobs_address} {words}", head.folder)


def run_folder_of(ended: Ended) -> Path:
    return Path(re.findall(r"run folder +(/.+)$", ended.stdout, re.MULTILINE)[-1])


def test_a_job_is_followed_and_its_run_outlives_its_folder(head: Cluster) -> None:
    ended = submit(head, f"train {TRAIN_FLAGS} --train.max-steps 20 --output.name first").wait()
    assert ended.returncode == 0, ended.told()
    assert re.search(r"^uploading [\d.]+ [kM]B of /", ended.stdout, re.MULTILINE)
    assert "submitted raysubmit_" in ended.stdout
    assert "finished in " in ended.stdout
    assert "\x1b" not in ended.stdout  # no bars, no colours
    folder = run_folder_of(ended)
    assert folder == head.folder / "home" / "runs" / "first"  # Ray removes the folder that the job works in
    assert (folder / "model" / "model.safetensors").is_file()
    assert state(folder)["status"] == "finished"


@pytest.mark.bundled
def test_the_command_of_the_readme(head: Cluster) -> None:
    (head.folder / "experiments").mkdir()
    shutil.copy(ROOT / "experiments" / "bbc_news.yaml", head.folder / "experiments")
    short = "--model.name tiny --train.max-steps 4 --scaling.num-workers 1"
    ended = Program(f"{SUBMIT} {short}", head.folder, extra={"RAY_ADDRESS": head.jobs_address}).wait()
    assert ended.returncode == 0, ended.told()
    assert state(head.folder / "home" / "runs" / "bbc")["status"] == "finished"


def test_the_exit_code_is_that_of_the_program(head: Cluster) -> None:
    ended = submit(head, f"train {TRAIN_FLAGS} --data.label-column absent").wait()
    assert ended.returncode == 2, ended.told()
    assert "absent" in ended.stdout


def test_a_stopped_job_saves_and_goes_on_when_it_is_submitted_again(head: Cluster) -> None:
    flags = f"train {TRAIN_FLAGS} --train.num-epochs 2 --output.name stopped --auto-resume"
    program = submit(head, f"--submission-id to-be-stopped {flags}")
    folder = head.folder / "home" / "runs" / "stopped"
    program.wait_until(lambda: (folder / "metrics.jsonl").exists())
    head.ray("job", "stop", "to-be-stopped", "--address", head.jobs_address)
    ended = program.wait()
    assert ended.returncode == 130, ended.told()
    stopped_at = state(folder)["step"]
    assert state(folder)["status"] == "interrupted"
    assert f"interrupted and saved after step {stopped_at:,}" in ended.stdout
    assert "raytrain-bert submit train --resume" in ended.stdout
    again = submit(head, flags).wait()
    assert again.returncode == 0, again.told()
    assert f"going on after step {stopped_at:,}" in again.stdout
    steps = [record["step"] for record in metrics(folder, "train")]
    assert steps == list(range(1, state(folder)["step"] + 1))
    assert len(steps) > stopped_at
    over = submit(head, flags).wait()
    assert over.returncode == 0, over.told()
    assert "has finished already" in over.stdout


def test_rays_own_command_does_it_too(head: Cluster) -> None:
    command = f"python -m raytrain_bert.train {TRAIN_FLAGS} --train.max-steps 8 --output.name by_ray"
    words = f"job submit --address {head.jobs_address} --working-dir . --runtime-env runtime_env.yaml -- {command}"
    ended = Program(f"ray {words}", head.folder, extra=head.extra).wait()
    assert ended.returncode == 0, ended.told()
    assert state(head.folder / "home" / "runs" / "by_ray")["status"] == "finished"


def test_mistakes_are_told_before_anything_is_sent(head: Cluster, tmp_path: Path) -> None:
    ended = submit(head, "train --optim.lerning-rate 1").wait()
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "did you mean --optim.learning-rate" in ended.stderr
    wrong = Program(
        f"raytrain-bert submit --address {head.jobs_address} --working-dir . train", tmp_path,
        extra={"RAY_AUTH_TOKEN": "f" * 64},
    ).wait()  # fmt: skip
    assert wrong.returncode == 2, wrong.told()
    assert "RAY_AUTH_TOKEN" in wrong.stderr
    assert "get-auth-token" in wrong.stderr


@pytest.mark.parametrize("command", ["raytrain-bert submit --address http://127.0.0.1:{port} train",
                                     "python -m raytrain_bert.train --scaling.address 127.0.0.1:{port}",
                                     "python -m raytrain_bert.tune --scaling.address 127.0.0.1:{port}"])  # fmt: skip
def test_nobody_at_an_address_is_told_within_seconds(command: str, tmp_path: Path) -> None:
    ended = run(command.format(port=free_port()), tmp_path)
    assert ended.returncode == 2, ended.told()
    assert "ray start --head" in ended.stderr
    assert ended.seconds < 15
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


def test_somebody_else_at_an_address_is_told_too(tmp_path: Path) -> None:
    with socket.socket() as mute:  # accepts, and never says a word
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        port = mute.getsockname()[1]
        ended = run(f"python -m raytrain_bert.train --scaling.address 127.0.0.1:{port}", tmp_path)
    assert ended.returncode == 2, ended.told()
    assert "No Ray cluster answers" in ended.stderr
    assert ended.seconds < 25
