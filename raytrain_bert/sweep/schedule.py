"""Which trials are ended early: Ray Tune's schedulers, with a word on why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)

from raytrain_bert.config.schema import Config
from raytrain_bert.config.sweep import SweepSettings
from raytrain_bert.scores import METRICS
from raytrain_bert.sweep.space import Space, normalised
from raytrain_bert.sweep.trial import SCORE, number_of

TIME = {"epochs": "epoch", "steps": "step"}
# What may change between two steps of a run: nothing that the order of rows or the shape of the model depends on.
PERTURBED_SECTIONS = ("optim",)
PERTURBED = ("model.dropout",)


@dataclass(frozen=True)
class Ended:
    """A trial of an earlier session, as schedulers need it."""

    trial_id: str


class Asha(AsyncHyperBandScheduler):
    """ASHA (Li et al. 2018), which says why it ends a trial."""

    def __init__(self, reasons: dict[int, str], unit: str, **options: Any) -> None:
        """`reasons` is filled by trial number."""
        super().__init__(**options)
        self.reasons, self.unit, self.factor = reasons, unit, options["reduction_factor"]

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """See the base class."""
        decision: str = super().on_trial_result(tune_controller, trial, result)
        if decision == TrialScheduler.STOP:
            told = f"{result[TIME[self.unit]]:g} {self.unit}: {_told(result)} is not among the best 1/{self.factor:g}"
            self.reasons[number_of(str(trial))] = f"asha after {told}"
        return decision


class Median(MedianStoppingRule):
    """The median stopping rule (Golovin et al. 2017), which says why it ends a trial."""

    def __init__(self, reasons: dict[int, str], unit: str, **options: Any) -> None:
        """`reasons` is filled by trial number."""
        # Without a slice it would pause trials while others wait: each goes to its end instead.
        super().__init__(min_time_slice=math.inf, **options)  # type: ignore[arg-type]
        self.reasons, self.unit = reasons, unit

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """See the base class."""
        decision: str = super().on_trial_result(tune_controller, trial, result)
        if decision == TrialScheduler.STOP:
            told = f"{result[TIME[self.unit]]:g} {self.unit}: its best is below the median of the others"
            self.reasons[number_of(str(trial))] = f"median after {told}"
        return decision


def build_scheduler(
    settings: SweepSettings, space: Space, base: Config, reasons: dict[int, str], longest: float
) -> Any:
    """Ray Tune's scheduler for these settings.

    Args:
        settings: of the sweep.
        space: what is searched, for pbt.
        base: the configuration that samples are put into.
        reasons: filled with why a trial was ended, by its number.
        longest: the longest that a trial takes, in the unit of the settings.
    """
    mode, unit = METRICS[base.train.best_metric], settings.unit
    common: dict[str, Any] = {"time_attr": TIME[unit], "metric": SCORE, "mode": mode}
    if settings.scheduler == "asha":
        return Asha(
            reasons,
            unit,
            grace_period=settings.grace,
            max_t=max(longest, settings.grace),
            reduction_factor=settings.reduction_factor,
            stop_last_trials=False,
            **common,
        )
    if settings.scheduler == "median":
        return Median(reasons, unit, grace_period=settings.grace, **common)
    if settings.scheduler == "pbt":
        return PopulationBasedTraining(
            perturbation_interval=settings.perturb_every,
            burn_in_period=settings.grace,
            custom_explore_fn=Explorer(space, base, settings.seed),
            log_config=False,
            **common,
        )
    return FIFOScheduler()


class Explorer:
    """pbt: new settings for a trial that takes over from another."""

    def __init__(self, space: Space, base: Config, seed: int) -> None:
        """Only what may change in mid-run is changed."""
        self.space, self.base = space, base
        self.keys = perturbed_keys(space)
        self.rng = np.random.default_rng(np.random.SeedSequence([seed, 1]))

    def __call__(self, config: dict[str, Any]) -> dict[str, Any]:
        """The configuration of the trial that was better, with its settings moved."""
        sample = config["trial"]["sample"]
        try:
            moved = normalised(self.space.perturbed(sample, self.rng, self.keys), self.base)
        except ValidationError:
            moved = sample
        return config | {"trial": config["trial"] | {"sample": moved}}


def perturbed_keys(space: Space) -> list[str]:
    """Searched settings that pbt may change in mid-run."""
    return [key for key in space.keys if key.partition(".")[0] in PERTURBED_SECTIONS or key in PERTURBED]


def remember(scheduler: Any, number: int, reports: Sequence[dict[str, Any]]) -> None:
    """Let a scheduler know of a trial that ended in an earlier session, so that new ones are compared with it."""
    if not reports or not isinstance(scheduler, (AsyncHyperBandScheduler, MedianStoppingRule)):
        return
    ended: Any = Ended(f"{number:04d} earlier")
    scheduler.on_trial_add(None, ended)  # type: ignore[arg-type]
    for report in reports:
        if isinstance(scheduler, MedianStoppingRule):
            scheduler._results[ended].append(report)
        elif AsyncHyperBandScheduler.on_trial_result(scheduler, None, ended, report) == TrialScheduler.STOP:  # type: ignore[arg-type]
            break
    scheduler.on_trial_complete(None, ended, dict(reports[-1]))


def _told(result: dict[str, Any]) -> str:
    value = result.get("value")
    return "a score that is no number" if value is None else f"{value:.4g}"
