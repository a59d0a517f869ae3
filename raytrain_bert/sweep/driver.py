"""The search: Ray Tune in a thread, the view and the signals in this one."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray import tune
from ray.tune import Callback, CheckpointConfig, FailureConfig, RunConfig, Stopper, TuneConfig, Tuner

from raytrain_bert.config.sweep import SweepSettings
from raytrain_bert.driver import LOOKS_FOR_SIGNALS, SECONDS_BETWEEN_LOOKS, Signals
from raytrain_bert.scores import METRICS
from raytrain_bert.sweep.page import Page
from raytrain_bert.sweep.records import SweepFolder, Trial
from raytrain_bert.sweep.resources import TrialPlan, held_too_much
from raytrain_bert.sweep.schedule import TIME, build_scheduler, remember
from raytrain_bert.sweep.screen import Now, SweepScreen, estimate, sample_told
from raytrain_bert.sweep.search import TPE, Draws, Suggestions, algorithm_of, planned
from raytrain_bert.sweep.space import Sample, Space
from raytrain_bert.sweep.state import SweepState
from raytrain_bert.sweep.trial import SCORE, Shared, TrainingTrial, comparable, number_of
from raytrain_bert.watch import waiting_for_resources

SECONDS_TO_FREE = 20.0
"""After a trial's end its CPUs and GPUs must be free by then."""
SECONDS_OF_SILENCE = 30.0


@dataclass(frozen=True)
class Search:
    """Everything that a search works with."""

    folder: SweepFolder
    settings: SweepSettings
    space: Space
    shared: Shared
    plan: TrialPlan
    state: SweepState
    screen: SweepScreen
    name: str
    page: Page
    seconds_before: float = 0.0
    """Time that earlier sessions of this sweep took."""

    @property
    def metric(self) -> str:
        """The chosen metric."""
        return self.shared.base.train.best_metric


def search(job: Search) -> str | None:
    """Run all trials that are left; gives why it ended early: a signal's name, or None."""
    started = time.monotonic()
    # Ray Tune's own files of each trial: ours hold the same and more.
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    os.environ["TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S"] = "0"
    random.seed(job.settings.seed)  # pbt chooses by it
    shutil.rmtree(job.folder.tune_path, ignore_errors=True)
    job.folder.stop_path.unlink(missing_ok=True)
    samples = planned(job.settings, job.space, job.shared.base)
    total = len(samples) if samples is not None else job.settings.num_trials
    state = job.state
    state.told = lambda what, trial: job.screen.trial_line(what, trial, job.metric, state.best())
    budget = Budget(job, started)
    tuner = make_tuner(job, samples, budget)
    outcome: list[BaseException] = []

    def work() -> None:
        try:
            tuner.fit()
        except BaseException as error:  # handed to the main thread
            outcome.append(error)

    thread = threading.Thread(target=work, name="ray-tune-fit", daemon=True)
    free_at_first = free_resources()
    guard = ResourceGuard(job, free_at_first)
    job.screen.watch()
    try:
        with Signals() as signals:
            thread.start()
            while thread.is_alive():
                for _ in range(LOOKS_FOR_SIGNALS):
                    thread.join(SECONDS_BETWEEN_LOOKS / LOOKS_FOR_SIGNALS)
                    if signals.received and not state.interrupted:
                        job.folder.stop_path.touch()
                        state.stopping, state.interrupted = signals.received, True
                        job.screen.note("stopping: the trials save where they are; once more stops at once")
                job.screen.now = where(job, total, started)
                news = state.changed.is_set()
                state.changed.clear()
                job.page.update(job.screen.now, news=news)
                guard.look()
    finally:
        job.screen.close()
    if outcome:
        raise outcome[0]
    state.end_all()
    shutil.rmtree(job.folder.tune_path, ignore_errors=True)
    job.folder.stop_path.unlink(missing_ok=True)
    if not state.interrupted:
        shutil.rmtree(job.folder.clones_path, ignore_errors=True)
        guard.wait_until_free()
    return state.stopping if state.interrupted else None


def where(job: Search, total: int | None, started: float) -> Now:
    """Where the search stands."""
    trials = job.state.trials()
    seconds = job.seconds_before + time.monotonic() - started
    spent = {trial.number: trial.seconds for trial in trials if trial.status == "running"}
    eta = estimate(trials, total, job.plan.concurrent, spent)
    if eta is None and job.settings.minutes is not None:
        eta = max(0.0, 60 * job.settings.minutes - seconds)
    return Now(trials, job.space.keys, job.metric, total, seconds, eta, job.settings.unit)


def make_tuner(job: Search, samples: Sequence[Sample] | None, budget: Budget) -> Tuner:
    """Ray Tune, set up for the trials that are left."""
    settings, base, state = job.settings, job.shared.base, job.state
    earlier = state.trials()
    ended = [trial for trial in earlier if trial.has_ended]
    waiting = [trial for trial in earlier if not trial.has_ended]
    scheduler = build_scheduler(settings, job.space, base, state.reasons, longest(job))
    for trial in ended:
        remember(scheduler, trial.number, reports_of(job, trial))
    space: dict[str, Any] = {}
    search_alg = None
    sweep = job.name
    if samples is not None:
        done = {trial.number for trial in ended}
        # pbt may have moved the settings of a trial that goes on.
        present = {trial.number: trial.sample for trial in waiting}
        left = [
            {"number": number, "sample": present.get(number, sample)}
            for number, sample in enumerate(samples, 1)
            if number not in done
        ]
        space = {"trial": tune.grid_search(left)}
    else:
        source: Draws | TPE
        if algorithm_of(settings, job.space) == "tpe":
            source = TPE(settings, job.space, base, ended)
        else:
            source = Draws(settings.seed, job.space, base, done=len(earlier))
        last = max((trial.number for trial in earlier), default=0)
        search_alg = Suggestions(waiting, last + 1, settings.num_trials, source, job.metric)
    trainable: Any = tune.with_parameters(TrainingTrial, shared=job.shared)
    trainable = tune.with_resources(trainable, tune.PlacementGroupFactory([job.plan.bundle]))
    trainable.__name__ = trainable.__qualname__ = "Trial"  # the class that Ray's dashboard names
    return Tuner(
        trainable,
        param_space=space or None,
        tune_config=TuneConfig(
            metric=None if settings.scheduler in ("asha", "median", "pbt") else SCORE,
            mode=None if settings.scheduler in ("asha", "median", "pbt") else METRICS[job.metric],
            num_samples=1 if samples is not None else -1,
            search_alg=search_alg,
            scheduler=scheduler,
            max_concurrent_trials=job.plan.concurrent,
            trial_name_creator=lambda trial: name_of(trial, sweep),
            trial_dirname_creator=lambda trial: f"{trial.config['trial']['number']:04d}-{trial.trial_id}",
        ),
        run_config=RunConfig(
            name=".tune",
            storage_path=str(job.folder.path),
            stop=budget,
            failure_config=FailureConfig(max_failures=base.scaling.max_failures),
            checkpoint_config=CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=False),
            callbacks=[Notes(job)],
            verbose=0,
        ),
    )


def name_of(trial: Any, sweep: str) -> str:
    """What a trial is called in Ray's dashboard."""
    chosen = trial.config["trial"]
    return f"{chosen['number']:04d} {sample_told(chosen['sample'])} (sweep {sweep})"


def longest(job: Search) -> float:
    """The longest that a trial takes, in the unit of the settings."""
    settings, base = job.settings, job.shared.base
    if settings.maximum is not None:
        return settings.maximum
    epochs = [base.train.num_epochs]
    epochs += [int(end) for domain in job.space.domains if domain.key == "train.num_epochs" for end in domain.ends()]
    if settings.unit == "epochs":
        return float(max(epochs))
    sizes = [base.train.global_batch_size]
    sizes += [int(e) for domain in job.space.domains if domain.key == "train.global_batch_size" for e in domain.ends()]
    rows = max(tokens.data.num_rows["train"] for tokens in job.shared.tokens)
    steps = max(epochs) * -(-rows // min(sizes))
    return float(min(steps, base.train.max_steps or steps))


def reports_of(job: Search, trial: Trial) -> list[dict[str, Any]]:
    """What a trial of an earlier session reported, from its run folder."""
    unit = TIME[job.settings.unit]
    return [
        {SCORE: comparable(job.metric, record.get(job.metric)), "value": record.get(job.metric), unit: record[unit]}
        for record in job.folder.trial(trial.number).records("validation")
    ]


class Notes(Callback):
    """Takes down what Ray Tune tells of its trials."""

    def __init__(self, job: Search | None) -> None:
        """None for the copy that Ray Tune keeps in its own files, which nobody reads."""
        self.job = job

    def __reduce__(self) -> tuple[Any, ...]:
        return Notes, (None,)

    def __deepcopy__(self, memo: Any) -> Notes:
        return self

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """See Callback."""
        if self.job is not None:
            self.job.state.started(number_of(str(trial)), trial.config["trial"]["sample"])

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
        """See Callback."""
        if self.job is not None and not result.get("done"):
            self.job.state.reported(number_of(str(trial)), result)

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """See Callback."""
        self._ended(trial, None)

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """See Callback."""
        error = trial.get_error()
        self._ended(trial, last_line(str(error)) if error is not None else "its process has died")

    def _ended(self, trial: Any, error: str | None) -> None:
        if self.job is None:
            return
        state, settings = self.job.state, self.job.settings
        result = trial.last_result or {}
        number, unit = number_of(str(trial)), settings.unit
        time_spent = result.get(TIME[unit])
        if settings.maximum is not None and time_spent is not None and time_spent >= settings.maximum:
            state.reasons.setdefault(number, f"maximum of {settings.maximum:g} {unit}")
        state.ended(number, result, error)
        if settings.scheduler != "pbt":  # there, others may still take over from it
            state.forget_checkpoints(max(settings.num_to_keep, settings.soup or 0))


class Budget(Stopper):
    """Ends a trial at its maximum, and the search when its time or GPU time is used up or the user stops it."""

    def __init__(self, job: Search | None, started: float) -> None:
        """None for the copy in Ray Tune's own files."""
        self.job, self.started = job, started

    def __reduce__(self) -> tuple[Any, ...]:
        return Budget, (None, 0.0)

    def __deepcopy__(self, memo: Any) -> Budget:
        return self

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Whether this trial ends now."""
        if self.job is None or self.job.settings.maximum is None:
            return False
        return bool(result.get(TIME[self.job.settings.unit], 0) >= self.job.settings.maximum)

    def stop_all(self) -> bool:
        """Whether the search ends now."""
        if self.job is None:
            return False
        state, settings = self.job.state, self.job.settings
        if state.stopping is None:
            minutes = (self.job.seconds_before + time.monotonic() - self.started) / 60
            if settings.minutes is not None and minutes >= settings.minutes:
                state.stopping = f"the {settings.minutes:g} minutes of the search are over"
            elif settings.gpu_minutes is not None and state.gpu_seconds() / 60 >= settings.gpu_minutes:
                state.stopping = f"the {settings.gpu_minutes:g} GPU minutes of the search are used up"
        return state.stopping is not None


class ResourceGuard:
    """Sees that what ended trials held is free again, and says what the next ones wait for."""

    def __init__(self, job: Search, before: dict[str, float]) -> None:
        """`before` is what was free before the first trial."""
        self.job, self.before = job, before
        self._since: float | None = None
        self._told = False
        self._idle_since = time.monotonic()
        self._waiting_told = False
        self.longest = 0.0
        """Longest time in seconds that something was held after a trial's end."""

    def look(self) -> None:
        """Look once; warn where something is held too long."""
        running = len(self.job.state.running())
        now = time.monotonic()
        held = held_too_much(self.job.plan, running, self.before)
        if held is None:
            self._since = None
        else:
            self._since = self._since or now
            self.longest = max(self.longest, now - self._since)
            if now - self._since > SECONDS_TO_FREE and not self._told:
                self._told = True
                self.job.screen.warning(
                    f"{held} are held {now - self._since:.0f} s after the trial that had them ended; "
                    "the next ones may have to wait."
                )
        if running:
            self._idle_since, self._waiting_told = now, False
        elif now - self._idle_since > SECONDS_OF_SILENCE and not self._waiting_told:
            self._waiting_told = True
            if text := waiting_for_resources():
                self.job.screen.note(text)

    def wait_until_free(self) -> None:
        """After the last trial: everything must be free."""
        end = time.monotonic() + SECONDS_TO_FREE
        while (held := held_too_much(self.job.plan, 0, self.before)) and time.monotonic() < end:
            time.sleep(0.2)
        if held:
            self.job.screen.warning(f"{held} are still held {SECONDS_TO_FREE:.0f} s after the last trial.")
        self.job.folder.state.update(resources_free_after_seconds=round(self.longest, 1), resources_held=held)


def free_resources() -> dict[str, float]:
    """What of the cluster is free."""
    import ray

    free: dict[str, float] = ray.available_resources()
    return free


def last_line(text: str) -> str:
    """The last line of an error, which names it."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no word of it"
