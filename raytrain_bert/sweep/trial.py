"""One trial: the training run of `train`, driven by Ray Tune. Ray Tune starts it in a process of its own."""

from __future__ import annotations

import json
import math
import os
import queue
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import tune

from raytrain_bert.checkpoint import CheckpointStore
from raytrain_bert.config.errors import RunFolderError, TrainingError, UserError
from raytrain_bert.config.load import dump_yaml
from raytrain_bert.config.schema import Config
from raytrain_bert.progress.board import DriverBoard
from raytrain_bert.progress.screen import Screen
from raytrain_bert.run import train_on
from raytrain_bert.run_folder import now, provenance
from raytrain_bert.scores import METRICS
from raytrain_bert.sweep.records import SweepFolder
from raytrain_bert.sweep.space import TOKEN_KEYS, Sample, normalised, value_of, with_sample

if TYPE_CHECKING:
    from raytrain_bert.data.prepare import PreparedData
    from raytrain_bert.runtime import WorkerPlan

SCORE = "score"
"""What schedulers compare: the chosen metric, the worst there is in place of NaN."""
SECONDS_TO_SAVE = 60.0
POINTER = "checkpoint.json"
SAME_VALUE = 1e-6


@dataclass(frozen=True)
class Tokens:
    """Tokenised data for one choice of the settings that decide the tokens."""

    choice: Sample
    data: PreparedData
    longest: int
    """Longest input that the model takes, in tokens."""


@dataclass(frozen=True)
class Shared:
    """What all trials of a sweep have in common; it lies in Ray's object store once."""

    folder: str
    base: Config
    tokens: tuple[Tokens, ...]
    workers: WorkerPlan
    started: float = 0.0

    def tokens_for(self, config: Config) -> Tokens:
        """The tokenised data of a trial's configuration."""
        for tokens in self.tokens:
            if all(value_of(config, key) == value for key, value in tokens.choice.items()):
                return tokens
        raise AssertionError(f"no tokens for {[value_of(config, key) for key in TOKEN_KEYS]}")


class Reporter(Screen):
    """Stands in for a run's screen: makes reports to Ray Tune out of its events.

    A validation is reported once its checkpoint is complete: a trial that is ended for it leaves that checkpoint.
    """

    def __init__(self, metric: str, sample: Sample, base: Config) -> None:
        """Nothing to report yet."""
        super().__init__(None)
        self.metric, self.sample, self.base = metric, sample, base
        self.reports: queue.Queue[dict[str, Any]] = queue.Queue()
        self.effective: dict[str, Any] = {}
        self.last: dict[str, Any] | None = None
        self._pending: Mapping[str, Any] | None = None

    def handle(self, event: Mapping[str, Any]) -> None:
        """See Screen."""
        kind = event["event"]
        if kind == "ready":
            self.effective = {key: event["effective"].get(key) for key in self.sample}
            check_effective(self.sample, self.effective)
        elif kind == "validation":
            self._pending = event
        elif kind == "checkpoint" and self._pending is not None and event["step"] >= self._pending["step"]:
            self._report(self._pending)
            self._pending = None

    def _report(self, event: Mapping[str, Any]) -> None:
        value = event["scores"].get(self.metric)
        self.last = {
            SCORE: comparable(self.metric, value),
            "epoch": float(event["epoch"]),
            "step": int(event["step"]),
            "value": value,
            "best": dict(event["best"]),
            "effective": self.effective,
        }
        self.reports.put(self.last)


class TrainingTrial(tune.Trainable):
    """What Ray Tune runs: `step` gives the next validation of a training run that goes on meanwhile."""

    shared: Shared
    number = 0
    told_as = "trial"

    def setup(self, config: dict[str, Any], shared: Shared | None = None) -> None:
        """Nothing starts before the first step: Ray Tune may hand over a checkpoint in between."""
        assert shared is not None
        self.shared = shared
        self.folder = SweepFolder(Path(shared.folder))
        self.number = number_of(self.trial_name)
        self.told_as = self.trial_name
        self.sample: Sample = normalised(config["trial"]["sample"], shared.base)
        self.run = self.folder.trial(self.number)
        self.reporter = Reporter(shared.base.train.best_metric, self.sample, shared.base)
        self.board: DriverBoard | None = None
        self.failure: str | None = None
        self.thread: threading.Thread | None = None
        self.begun = time.monotonic()

    def __repr__(self) -> str:
        """What Ray's dashboard shows."""
        return self.told_as

    def step(self) -> dict[str, Any]:
        """Wait for the next report."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._train, name="trial", daemon=True)
            self.thread.start()
        reports = self.reporter.reports
        while True:
            ended = not self.thread.is_alive()
            try:
                return reports.get(timeout=0 if ended else 0.2)
            except queue.Empty:
                if ended:
                    return self._last_words()

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Point to a copy of the newest checkpoint, which this trial or another may go on from."""
        source = self.run.path / "checkpoints"
        target = self.folder.clones_path / f"{self.number:04d}-{time.time_ns()}"
        step = link_checkpoint(source, target)
        forget_old_clones(self.folder.clones_path, f"{self.number:04d}-")
        pointer = {"number": self.number, "step": step, "folder": target.name}
        (Path(checkpoint_dir) / POINTER).write_text(json.dumps(pointer), encoding="utf-8")

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Take over another trial's checkpoint (a folder); where it is this one's own, the run folder has it."""
        pointer = json.loads((Path(checkpoint) / POINTER).read_text(encoding="utf-8"))
        if pointer["number"] == self.number or pointer["step"] is None:
            return
        checkpoints = self.run.path / "checkpoints"
        shutil.rmtree(checkpoints, ignore_errors=True)
        link_checkpoint(self.folder.clones_path / pointer["folder"], checkpoints)
        taken = {"from_trial": pointer["number"], "at_step": pointer["step"], "sample": self.sample}
        history = [*self.run.state().get("history", []), taken]
        self.run.update(history=history, last_checkpoint=f"step-{pointer['step']:08d}")

    def cleanup(self) -> None:
        """Ray Tune ends this trial; where it is to go on later, its state is saved first."""
        if self.folder.stop_path.exists() and self.board is not None and self.thread is not None:
            self.board.request_stop("the sweep is being stopped")
            self.thread.join(SECONDS_TO_SAVE)

    def _last_words(self) -> dict[str, Any]:
        """The result with which the trial ends."""
        assert self.reporter is not None
        last = self.reporter.last or {SCORE: comparable(self.reporter.metric, None), "epoch": 0.0, "step": 0}
        return last | {"done": True, "failed": self.failure}

    def _train(self) -> None:
        """The whole run, in a thread of its own."""
        try:
            train_trial(self)
        except BaseException as error:  # told by the last report
            self.failure = one_line(error)
            self.run.error_path.parent.mkdir(parents=True, exist_ok=True)
            self.run.error_path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
            self.run.update(status="failed", failure=self.failure, ended=now())

    def have_board(self, board: DriverBoard) -> None:
        """By it the training can be asked to stop."""
        self.board = board


def train_trial(trial: TrainingTrial) -> None:
    """Train one trial to its end, from its own newest checkpoint where there is one."""
    shared, run, sample = trial.shared, trial.run, trial.sample
    config = with_sample(shared.base, sample)
    output = config.output.model_copy(update={"storage_path": str(run.path.parent), "name": run.path.name})
    config = config.model_copy(update={"output": output})
    tokens = shared.tokens_for(config)
    attempt = provenance(sys.argv[:1])
    resumed = run.state_path.is_file() and any((run.path / "checkpoints").glob("step-*"))
    if resumed:
        earlier = run.state().get("resumed", [])
        run.update(status="preparing", host=attempt["host"], pid=attempt["pid"], resumed=[*earlier, attempt])
        run.config_path.write_text(dump_yaml(config), encoding="utf-8")  # pbt may have changed it
    else:
        shutil.rmtree(run.path, ignore_errors=True)
        run.create(dump_yaml(config), **attempt)
    run.update(sample=sample)
    trained = train_on(
        tokens.data,
        config,
        run,
        shared.workers,
        tokens.longest,
        trial.reporter,
        started=trial.begun,
        resumed=resumed,
        purpose="trial",
        on_board=trial.have_board,
        name=trial.told_as.partition(" (sweep ")[0],
        sweep=Path(shared.folder).name,
        sample=sample,
    )
    run.update(
        status=trained.result["status"],
        ended=now(),
        step=trained.result["step"],
        seconds=trained.watch.split_of_time(),
        speed=trained.watch.speed(),
    )


def check_effective(sample: Sample, effective: Mapping[str, Any]) -> None:
    """The live optimizer and model must have what was sampled.

    Raises:
        TrainingError: they have something else.
    """
    for key, value in sample.items():
        found = effective.get(key)
        numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (value, found))
        if key not in effective or found is None:
            continue  # cannot be read, for example a decay between learning rates of 0
        same = math.isclose(value, found, rel_tol=SAME_VALUE, abs_tol=1e-12) if numbers else value == found
        if not same:
            raise TrainingError(f"{key} was sampled as {value!r}, and the run works with {found!r}.")


def comparable(metric: str, value: float | None) -> float:
    """A score that schedulers can sort: the worst there is in place of none."""
    if value is None or math.isnan(value):
        return -math.inf if METRICS[metric] == "max" else math.inf
    return value


def number_of(trial_name: str) -> int:
    """A trial's number, which its name begins with."""
    return int(trial_name.partition(" ")[0])


def link_checkpoint(source: Path, target: Path) -> int | None:
    """Copy the newest whole checkpoint and the best one that it speaks of; gives its step, None for none.

    Files are linked where the file system can: they are never changed once they are written.
    """
    store = CheckpointStore(source)
    for step in reversed(store.steps()):
        shutil.rmtree(target, ignore_errors=True)
        try:
            best = store.read_progress(step).best_step
            for wanted in {step, best} - {None}:
                assert wanted is not None
                name = store.path(wanted).name
                shutil.copytree(store.path(wanted), target / name, copy_function=link_or_copy)
        except (OSError, RunFolderError, shutil.Error):  # it was rotated away meanwhile
            continue
        return step
    return None


def link_or_copy(source: str, target: str) -> None:
    """A hard link, or a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def forget_old_clones(folder: Path, prefix: str, kept: int = 3) -> None:
    """Keep the last few copies of a trial."""
    for path in sorted(folder.glob(f"{prefix}*"))[:-kept]:
        shutil.rmtree(path, ignore_errors=True)


def one_line(error: BaseException) -> str:
    """Why a trial failed, in a line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
