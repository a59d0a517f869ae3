"""Schedulers, algorithms, soup, trackers and extension, in real sweeps of a tiny model; they share one Ray."""

from __future__ import annotations

import json
import math
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from raytrain_bert import tune
from tests.integration.running import metrics, state
from tests.reviews import reviews, write_csv
from tests.tiny import tiny_bert

KEY = "optim.learning_rate"
# Names in any script, in the data, the sweep and so in Ray's metrics and actors.
COMMON = (
    "--data.train größe.csv --data.test test.csv --model.name tiny --train.precision fp32 --train.global-batch-size 8 "
    "--optim.warmup-fraction 0 --optim.schedule constant --quiet"
)


class Tune(Protocol):
    """Runs a sweep in this process; gives its exit code and its folder."""

    def __call__(self, flags: str, name: str, *, resume: bool = False) -> tuple[int, Path]: ...


@pytest.fixture(scope="module")
def run_sweep(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tune]:
    workshop = tmp_path_factory.mktemp("sweeps")
    write_csv(workshop / "größe.csv", reviews(401, seed=0))
    write_csv(workshop / "test.csv", reviews(101, seed=1))
    tiny_bert(workshop / "tiny")
    at_sigterm = signal.getsignal(signal.SIGTERM)

    def run(flags: str, name: str, *, resume: bool = False) -> tuple[int, Path]:
        folder = workshop / "runs" / name
        words = ["--resume", str(folder), *flags.split()] if resume else [*COMMON.split(), *flags.split()]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(workshop)
            code = tune.main(words if resume else [*words, "--output.name", name])
        return code, folder

    yield run
    signal.signal(signal.SIGTERM, at_sigterm)


def trials_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trials.jsonl").read_text(encoding="utf-8").splitlines()]


def sweep_state(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
    return content


def with_a_test(folder: Path) -> list[str]:
    """Run folders of the sweep whose model has seen the test rows."""
    return sorted(path.parent.name for path in folder.glob("trials/*/metrics.jsonl") if metrics(path.parent, "test"))


def test_asha_ends_the_hopeless_trial_and_frees_what_it_held(run_sweep: Tune) -> None:
    import ray

    flags = "--train.num-epochs 6 --sweep.scheduler asha --sweep.reduction-factor 2 --sweep.max-concurrent 1"
    code, folder = run_sweep(f"{flags} --search.optim.learning-rate grid:2e-3,0 --output.trackers tensorboard", "ü")
    assert code == 0
    good, hopeless = trials_of(folder)
    assert (good["status"], good["epoch"]) == ("trained", 6)
    assert hopeless["status"] == "stopped"
    assert hopeless["why"].startswith("asha after 1 epochs: ")
    assert hopeless["epoch"] < 6
    found = sweep_state(folder)
    assert (found["best"]["trial"], found["resources_held"]) == (1, None)
    assert ray.available_resources()["CPU"] == 2
    assert with_a_test(folder) == ["0001"]
    check_tensorboard(folder, good)


def check_tensorboard(folder: Path, trial: dict[str, Any]) -> None:
    """The event files hold the curve of metrics.jsonl, and the sampled value with the best score."""
    run = folder / trial["path"]
    values = [(event.step, value) for event in events_of(run / "tensorboard") for value in event.summary.value]
    curve = [(step, value.simple_value) for step, value in values if value.tag == "validation/accuracy"]
    expected = [(record["step"], record["accuracy"]) for record in metrics(run, "validation")]
    assert curve == [(step, pytest.approx(value)) for step, value in expected]
    (session,) = (value for _, value in values if value.tag == "_hparams_/session_start_info")
    assert KEY.encode() in session.metadata.plugin_data.content
    (best,) = (value.simple_value for _, value in values if value.tag == "best/accuracy")
    assert best == pytest.approx(trial["best_score"])


def events_of(folder: Path) -> Iterator[Any]:
    """TensorBoard's events: records of a length, a checksum, the event and a checksum (TFRecord)."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(folder.rglob("events.out.*")):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            yield Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]


def test_pbt_moves_a_setting_and_the_live_optimizer_has_it(run_sweep: Tune) -> None:
    flags = "--train.num-epochs 3 --sweep.scheduler pbt --sweep.num-trials 2 --scaling.cpus-per-worker 1"
    code, folder = run_sweep(f"{flags} --search.optim.learning-rate loguniform:1e-5,2e-3", "pbt")
    assert code == 0
    trials = trials_of(folder)
    assert any(trial["history"] for trial in trials)
    for trial in trials:
        assert trial["effective"][KEY] == pytest.approx(trial["sample"][KEY], rel=1e-6)
        steps = metrics(folder / trial["path"], "train")
        ends = [*(change["at_step"] for change in trial["history"]), len(steps)][1:]
        for change, end in zip(trial["history"], ends, strict=False):
            assert change["from_trial"] != trial["number"]
            # A constant schedule: what the steps after the change worked with is the new value.
            for record in steps[change["at_step"] : end]:
                assert record["learning_rate"] == pytest.approx(change["sample"][KEY], rel=1e-6)
    assert sweep_state(folder)["status"] == "finished"


def test_tpe_and_a_soup_of_the_best(run_sweep: Tune) -> None:
    flags = "--train.num-epochs 2 --sweep.algorithm tpe --sweep.num-trials 4 --sweep.soup 3"
    code, folder = run_sweep(f"{flags} --search.optim.learning-rate loguniform:5e-4,5e-3", "soup")
    assert code == 0
    trials, found = trials_of(folder), sweep_state(folder)
    assert [trial["status"] for trial in trials] == ["trained"] * 4
    assert all(5e-4 <= trial["sample"][KEY] <= 5e-3 for trial in trials)
    soup, final = found["soup"], found["final"]
    best = max(trial["best_score"] for trial in trials)
    assert soup["alone"] == pytest.approx(best, abs=1e-6)
    assert soup["trials"][0] == soup["chosen"][0] == found["best"]["trial"]
    assert len(soup["trials"]) == 3
    if soup["score"] > soup["alone"]:
        assert (final["kind"], final["validation"]) == ("soup", soup["score"])
        assert (folder / "soup" / "model" / "model.safetensors").is_file()
        assert with_a_test(folder) == []
    else:
        assert final["kind"] == "trial"
        assert not (folder / "soup").exists()
        assert len(with_a_test(folder)) == 1


def test_a_finished_sweep_takes_more_trials_and_is_tested_again_only_for_a_new_winner(run_sweep: Tune) -> None:
    flags = "--train.max-steps 30 --train.validate-every-steps 15 --sweep.unit steps"
    code, folder = run_sweep(f"{flags} --sweep.num-trials 2 --search.optim.learning-rate uniform:1e-4,2e-3", "more")
    assert code == 0
    before, first = trials_of(folder), sweep_state(folder)
    assert run_sweep("", "more", resume=True)[0] == 2
    code, _ = run_sweep("--sweep.num-trials 4", "more", resume=True)
    assert code == 0
    after, second = trials_of(folder), sweep_state(folder)
    assert after[:2] == before
    assert [trial["step"] for trial in after] == [30] * 4
    winners = {first["best"]["trial"], second["best"]["trial"]}
    assert with_a_test(folder) == sorted(f"{number:04d}" for number in winners)
    assert second["final"]["trial"] == second["best"]["trial"]
    best = max(trial["best_score"] for trial in after)
    assert second["best"]["score"] == best


def test_the_winner_is_trained_anew_on_validation_rows_too(run_sweep: Tune) -> None:
    flags = "--train.num-epochs 3 --sweep.num-trials 1 --sweep.retrain-best --sweep.retrain-on-validation"
    code, folder = run_sweep(f"{flags} --search.optim.learning-rate grid:2e-3 --optim.schedule linear", "again")
    assert code == 0
    (trial,) = trials_of(folder)
    run, final = folder / "best", sweep_state(folder)["final"]
    rows = state(run)["rows"]
    steps_per_epoch = math.ceil((rows["train"] + rows["validation"]) / 8)
    steps = metrics(run, "train")
    assert len(steps) == round(trial["best_epoch"] * steps_per_epoch)
    for record in steps:  # the schedule is that of all three epochs, wherever the training ends
        left = 1 - (record["step"] - 1) / (3 * steps_per_epoch)
        assert record["learning_rate"] == pytest.approx(2e-3 * left)
    assert (final["kind"], final["validation"]) == ("retrained", None)
    assert "Trained on the validation rows too" in (run / "model" / "README.md").read_text(encoding="utf-8")
    assert with_a_test(folder) == []
    assert len(metrics(run, "test")) == 1
