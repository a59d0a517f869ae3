"""Settings of a sweep: those of a run, how it is searched, and the search space."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from .schema import Config, Settings


class SweepSettings(Settings):
    """How settings are searched."""

    algorithm: Literal["grid", "random", "tpe"] | None = Field(
        None,
        description="grid: every combination; random; tpe: Optuna's Tree-structured Parzen Estimator (extra tpe). "
        "None: grid where every searched setting is a grid, else random.",
    )
    num_trials: int | None = Field(
        8,
        ge=1,
        description="Trials in all; with grid settings among others, draws for each grid point. "
        "None: as many as the minutes allow.",
    )
    minutes: float | None = Field(None, gt=0, description="Longest time of the search in minutes. None: no limit.")
    gpu_minutes: float | None = Field(
        None, gt=0, description="Most GPU time of the search in minutes, summed over trials. None: no limit."
    )
    seed: int = Field(0, ge=0, description="Seed of the samples; the same seed gives the same trials.")
    scheduler: Literal["none", "asha", "median", "pbt"] = Field(
        "none",
        description="Which trials are ended early: asha (the best 1/reduction_factor go on at each rung), median "
        "(worse than the median of the others), pbt (population based training: the worst take over weights and "
        "settings of the best), none.",
    )
    unit: Literal["epochs", "steps"] = Field("epochs", description="Unit of grace, maximum and perturb_every.")
    grace: float = Field(1, gt=0, description="No trial is ended earlier, in `unit`.")
    maximum: float | None = Field(
        None, gt=0, description="Every trial ends then, in `unit`. None: with its last epoch."
    )
    reduction_factor: float = Field(3, gt=1, description="asha: one of so many trials goes on at each rung.")
    perturb_every: float = Field(1, gt=0, description="pbt: between two changes of a trial's settings, in `unit`.")
    max_concurrent: int | None = Field(
        None, ge=1, description="Most trials at a time. None: as many as the cluster has room for."
    )
    gpus_per_trial: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of a GPU for trials of one worker, for example 0.5 for two on each GPU. None: a whole one.",
    )
    num_to_keep: int = Field(3, ge=1, description="Trials whose checkpoints are kept: the best so many.")
    retrain_best: bool = Field(
        False, description="Train the best settings once more with all workers of the cluster, in SWEEP/best."
    )
    retrain_on_validation: bool = Field(
        False, description="Retrain on the validation rows too, up to the epoch of the winner's best validation."
    )
    soup: int | None = Field(
        None,
        ge=2,
        description="Average the weights of up to so many of the best trials, as far as validation gets better "
        "(greedy soup). None: no.",
    )

    def allows_more_than(self, before: SweepSettings) -> bool:
        """Whether a sweep that ended with the budgets of `before` may go on with these."""
        budgets = [(getattr(self, name), getattr(before, name)) for name in ("num_trials", "minutes", "gpu_minutes")]
        return any(old is not None and (new is None or new > old) for new, old in budgets)

    @model_validator(mode="after")
    def _has_an_end(self) -> SweepSettings:
        if self.num_trials is None and self.minutes is None and self.gpu_minutes is None:
            raise ValueError("num_trials none needs minutes or gpu_minutes: the search would never end")
        if self.maximum is not None and self.maximum < self.grace:
            raise ValueError(f"maximum {self.maximum:g} is below grace {self.grace:g} {self.unit}")
        if self.retrain_on_validation and not self.retrain_best:
            raise ValueError("retrain_on_validation needs retrain_best")
        if self.soup is not None and self.retrain_best:
            raise ValueError("soup and retrain_best exclude each other: one model is tested")
        return self


class SweepConfig(Config):
    """The whole configuration of a sweep: of its runs, of the search, and what is searched."""

    sweep: SweepSettings = Field(SweepSettings(), description="How settings are searched.")
    search: dict[str, Any] = Field({}, description="Search space: a domain for each searched setting.")

    def base(self) -> Config:
        """The configuration that the trials start from."""
        return Config(**{name: getattr(self, name) for name in Config.model_fields})
