"""Which samples are tried: a grid, random draws, or what Optuna suggests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from pydantic import ValidationError
from ray.tune.search import Searcher

from raytrain_bert.config.errors import ConfigError
from raytrain_bert.config.schema import Config
from raytrain_bert.config.sweep import SweepSettings
from raytrain_bert.scores import METRICS
from raytrain_bert.sweep.records import Trial
from raytrain_bert.sweep.space import Sample, Space, normalised

TRIES = 100
"""Draws for one new sample before the space counts as used up."""
STARTUP_TRIALS = 10
"""Random trials before Optuna models the space; fewer in a short sweep."""


def algorithm_of(settings: SweepSettings, space: Space) -> str:
    """grid, random or tpe.

    Raises:
        ConfigError: the space does not go with what is asked for.
    """
    chosen = settings.algorithm or ("grid" if space.is_grid else "random")
    numbers = [domain.key for domain in space.domains if not domain.is_list]
    if chosen == "grid" and numbers:
        raise ConfigError(f"sweep.algorithm grid: {', '.join(numbers)} has no list of values; use grid: [...].")
    if chosen == "tpe" and any(domain.kind == "grid" for domain in space.domains):
        raise ConfigError("sweep.algorithm tpe: a grid is tried whole, and Optuna chooses; use choice for grid.")
    if settings.scheduler == "pbt" and (chosen == "tpe" or settings.num_trials is None):
        raise ConfigError("sweep.scheduler pbt needs a population: sweep.algorithm random or grid, and num_trials.")
    return chosen


def planned(settings: SweepSettings, space: Space, base: Config) -> list[Sample] | None:
    """All samples of a grid or random search, in order; None where they cannot be known before.

    The same seed gives the same samples.
    """
    algorithm = algorithm_of(settings, space)
    if algorithm == "grid":
        return [normalised(sample, base) for sample in space.grid(("grid", "choice"))]
    if algorithm == "tpe" or settings.num_trials is None:
        return None
    draws = Draws(settings.seed, space, base)
    samples: list[Sample] = []
    while len(samples) < settings.num_trials * draws.points and (sample := draws.next()) is not None:
        samples.append(sample)
    return samples


class Draws:
    """Random samples, each once; the n-th one depends on the seed and those before it alone."""

    def __init__(self, seed: int, space: Space, base: Config, done: int = 0) -> None:
        """After `done` samples."""
        self.seed, self.space, self.base = seed, space, base
        self._grid = space.grid() or [{}]
        self._count = 0
        self._seen: set[str] = set()
        for _ in range(done):
            self.next()

    @property
    def points(self) -> int:
        """Grid points that each draw is made for."""
        return len(self._grid)

    def next(self) -> Sample | None:
        """The next sample; None where the space has no other."""
        fixed = self._grid[self._count % self.points]
        for attempt in range(TRIES):
            rng = np.random.default_rng(np.random.SeedSequence([self.seed, self._count // self.points, attempt]))
            try:
                sample = normalised(self.space.draw(rng, fixed), self.base)
            except ValidationError:  # single values pass, and this combination does not
                continue
            if (name := told(sample)) not in self._seen:
                self._seen.add(name)
                self._count += 1
                return sample
        return None


class Suggestions(Searcher):
    """Gives Ray Tune its trials one by one: first those that are to go on, then new ones."""

    def __init__(
        self, waiting: Sequence[Trial], first_new: int, limit: int | None, source: Draws | TPE, metric: str
    ) -> None:
        """
        Args:
            waiting: trials of an interrupted sweep that are not done.
            first_new: number of the next new trial.
            limit: number of the last trial; None for no limit.
            source: of new samples.
            metric: the chosen metric.
        """
        super().__init__(metric="score", mode=METRICS[metric])
        self._waiting, self._next, self._limit, self._source = list(waiting), first_new, limit, source
        self._numbers: dict[str, int] = {}

    def suggest(self, trial_id: str) -> Any:
        """The next trial as a mapping, or that there is none."""
        if self._waiting:
            trial = self._waiting.pop(0)
            number, sample = trial.number, trial.sample
            if isinstance(self._source, TPE):
                self._source.take_up(number, sample)
        else:
            if self._limit is not None and self._next > self._limit:
                return Searcher.FINISHED
            number = self._next
            new = self._source.next(number) if isinstance(self._source, TPE) else self._source.next()
            if new is None:
                return Searcher.FINISHED
            sample = new
            self._next += 1
        self._numbers[trial_id] = number
        return {"trial": {"number": number, "sample": sample}}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Let Optuna know what came of it."""
        number = self._numbers.get(trial_id)
        if number is not None and isinstance(self._source, TPE):
            failed = error or result is None or result.get("failed") is not None
            best = None if failed or result is None else result.get("best", {}).get("score")
            self._source.tell(number, best)

    def save(self, checkpoint_path: str) -> None:
        """Nothing: an interrupted sweep goes on from trials.jsonl."""

    def restore(self, checkpoint_path: str) -> None:
        """See save."""


class TPE:
    """Optuna's Tree-structured Parzen Estimator (Bergstra et al. 2011; optuna.samplers.TPESampler)."""

    def __init__(self, settings: SweepSettings, space: Space, base: Config, earlier: Iterable[Trial]) -> None:
        """
        Args:
            settings: seed and number of trials.
            space: what is searched.
            base: the configuration that samples are put into.
            earlier: trials that have ended, which it learns from.

        Raises:
            ConfigError: Optuna is not installed.
        """
        try:
            import optuna
        except ImportError:
            raise ConfigError(
                "sweep.algorithm tpe needs Optuna: pip install 'raytrain-bert[tpe]', or use random."
            ) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space, self.base, self.metric = space, base, base.train.best_metric
        ended = list(earlier)
        total = settings.num_trials or 4 * STARTUP_TRIALS
        startup = max(3, min(STARTUP_TRIALS, total // 3))
        self._study = optuna.create_study(
            direction="maximize" if METRICS[self.metric] == "max" else "minimize",
            sampler=optuna.samplers.TPESampler(
                seed=settings.seed + len(ended), n_startup_trials=startup, constant_liar=True
            ),
        )
        self._asked: dict[int, Any] = {}
        self._samples: dict[int, str] = {}
        self._scores: dict[str, float | None] = {}
        """What came of each sample, by its text; None for a failure."""
        self._others = Draws(settings.seed, space, base)
        for trial in ended:
            self._learn(trial)

    def next(self, number: int) -> Sample | None:
        """A sample that has not been tried; None where the space has no other.

        Where Optuna asks for what is known, it is told so instead of training it again.
        """
        for _ in range(TRIES):
            trial = self._study.ask()
            try:
                sample = normalised(self.space.suggest(trial), self.base)
            except ValidationError:
                self._fail(trial)
                continue
            name = told(sample)
            if name not in self._samples.values():
                self._asked[number], self._samples[number] = trial, name
                return sample
            self._tell(trial, self._scores.get(name))  # what runs at the moment counts as failed
        while (other := self._others.next()) is not None:
            if told(other) not in self._samples.values():
                self.take_up(number, other)
                return other
        return None

    def take_up(self, number: int, sample: Sample) -> None:
        """A trial goes on whose sample was suggested earlier."""
        domains = {domain.key: domain for domain in self.space.domains}
        self._study.enqueue_trial({key: domains[key].encoded(value) for key, value in sample.items()})
        trial = self._study.ask()
        self.space.suggest(trial)
        self._asked[number], self._samples[number] = trial, told(sample)

    def tell(self, number: int, score: float | None) -> None:
        """What came of a sample; None for a failure."""
        trial = self._asked.pop(number, None)
        if trial is not None:
            self._scores[self._samples[number]] = score
            self._tell(trial, score)

    def _tell(self, trial: Any, score: float | None) -> None:
        if score is None:
            self._fail(trial)
        else:
            self._study.tell(trial, score)

    def _fail(self, trial: Any) -> None:
        import optuna

        self._study.tell(trial, state=optuna.trial.TrialState.FAIL)

    def _learn(self, trial: Trial) -> None:
        import optuna

        domains = {domain.key: domain for domain in self.space.domains if domain.key in trial.sample}
        failed = trial.status == "failed" or trial.best_score is None
        self._samples[trial.number] = told(trial.sample)
        self._scores[told(trial.sample)] = None if failed else trial.best_score
        self._study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.FAIL if failed else optuna.trial.TrialState.COMPLETE,
                value=None if failed else trial.best_score,
                params={key: domain.encoded(trial.sample[key]) for key, domain in domains.items()},
                distributions={key: domain.distribution() for key, domain in domains.items()},
            )
        )


def told(sample: Sample) -> str:
    """A sample as text, the same for equal ones."""
    return json.dumps(sample, sort_keys=True, default=str)
