"""Experiment trackers that a run's figures go to beside its own files: TensorBoard, MLflow, Weights & Biases.

Off unless asked for. Each is a library of its own; one that fails ends its own log and not the training.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from raytrain_bert.config.errors import ConfigError
from raytrain_bert.config.schema import Config
from raytrain_bert.gauges import readings

# The module that each needs, and the extra that brings it.
MODULES = {"tensorboard": "tensorboardX", "mlflow": "mlflow", "wandb": "wandb"}
PROJECT = "raytrain_bert"


class Listener(Protocol):
    """Told of a run's events, in the process of its driver."""

    def take(self, event: Mapping[str, Any]) -> None:
        """One event."""

    def close(self, scores: Mapping[str, float]) -> None:
        """The run is over; `scores` are its best validation and its test, as far as there are any."""


class TensorBoard:
    """Event files in RUN/tensorboard; the sampled values and the best score go to the HParams page."""

    def __init__(
        self, folder: Path, run: str, sweep: str, settings: Mapping[str, Any], sample: Mapping[str, Any]
    ) -> None:
        """See make_trackers."""
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(logdir=str(folder / "tensorboard"))
        self._settings = dict(sample or settings)
        self._step = 0

    def take(self, event: Mapping[str, Any]) -> None:
        """See Listener."""
        for name, value, step in scalars(event):
            self._step = step
            self._writer.add_scalar(name, value, step)

    def close(self, scores: Mapping[str, float]) -> None:
        """See Listener."""
        values = {
            key: value if isinstance(value, (int, float, bool)) else str(value) for key, value in self._settings.items()
        }
        # The name keeps it in the same folder: one line a run in the HParams table.
        self._writer.add_hparams(values, dict(scores) or {"best": float("nan")}, name=".", global_step=self._step)
        self._writer.close()


class MLflow:
    """A run of the experiment raytrain_bert, or of the sweep; where it goes is MLflow's MLFLOW_TRACKING_URI."""

    def __init__(
        self, folder: Path, run: str, sweep: str, settings: Mapping[str, Any], sample: Mapping[str, Any]
    ) -> None:
        """See make_trackers."""
        from mlflow import MlflowClient

        self._client = MlflowClient()
        name = sweep or PROJECT
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._run = self._client.create_run(number, run_name=run, tags={"run_folder": str(folder)}).info.run_id
        for key, value in settings.items():
            self._client.log_param(self._run, key, str(value)[:500])

    def take(self, event: Mapping[str, Any]) -> None:
        """See Listener."""
        for name, value, step in scalars(event):
            self._client.log_metric(self._run, name, value, step=step)

    def close(self, scores: Mapping[str, float]) -> None:
        """See Listener."""
        for name, value in scores.items():
            self._client.log_metric(self._run, name, value)
        self._client.set_terminated(self._run)


class WeightsAndBiases:
    """A run of the project raytrain_bert, in the group of its sweep; WANDB_MODE=offline keeps it on this machine."""

    def __init__(
        self, folder: Path, run: str, sweep: str, settings: Mapping[str, Any], sample: Mapping[str, Any]
    ) -> None:
        """See make_trackers."""
        import wandb

        self._run = wandb.init(
            project=PROJECT, name=run, group=sweep or None, dir=str(folder), config=dict(settings), reinit="create_new"
        )

    def take(self, event: Mapping[str, Any]) -> None:
        """See Listener."""
        found = scalars(event)
        if found:
            self._run.log({name: value for name, value, _ in found}, step=found[-1][2])

    def close(self, scores: Mapping[str, float]) -> None:
        """See Listener."""
        self._run.summary.update(dict(scores))
        self._run.finish()


TRACKERS: dict[str, Callable[..., Listener]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WeightsAndBiases,
}


class Guarded:
    """A listener whose failure is told once and otherwise without effect."""

    def __init__(self, name: str, make: Callable[[], Listener], warn: Callable[[str], None]) -> None:
        """Make it; `warn` is told if it fails."""
        self._name, self._warn = name, warn
        self._listener: Listener | None = None
        self._try(lambda: setattr(self, "_listener", make()))

    def take(self, event: Mapping[str, Any]) -> None:
        """See Listener."""
        listener = self._listener
        if listener is not None:
            self._try(lambda: listener.take(event))

    def close(self, scores: Mapping[str, float]) -> None:
        """See Listener."""
        listener = self._listener
        if listener is not None:
            self._try(lambda: listener.close(scores))

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._listener = None
            self._warn(f"{self._name}: no more figures of this run, after {type(error).__name__}: {error}")


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that are not installed.

    Raises:
        ConfigError: names what to install.
    """
    missing = [name for name in names if importlib.util.find_spec(MODULES[name]) is None]
    if missing:
        raise ConfigError(
            f"output.trackers: {', '.join(missing)} is not installed: pip install 'raytrain-bert[{','.join(missing)}]'."
        )


def make_trackers(
    config: Config, folder: Path, run: str, warn: Callable[[str], None], *, sweep: str = "", sample: Mapping[str, Any]
) -> list[Listener]:
    """The trackers that the configuration asks for.

    Args:
        config: of the run.
        folder: its run folder.
        run: its name.
        warn: told where one fails.
        sweep: name of the sweep it belongs to.
        sample: its sampled values by dotted key.
    """
    settings = {
        f"{section}.{name}": value
        for section, values in config.model_dump(mode="json").items()
        if section in ("data", "model", "optim", "train")
        for name, value in values.items()
    }

    def maker(name: str) -> Callable[[], Listener]:
        return lambda: TRACKERS[name](folder, run, sweep, settings, sample)

    return [Guarded(name, maker(name), warn) for name in config.output.trackers or ()]


def scalars(event: Mapping[str, Any]) -> list[tuple[str, float, int]]:
    """Name, value and step of what an event tells: train/loss, validation/accuracy, test/macro_f1, ..."""
    kind = event["event"]
    if kind == "steps" and event["records"]:
        step = event["records"][-1]["step"]
        return [(f"train/{name}", value, step) for name, value, _ in readings(event) if name != "step"]
    if kind in ("validation", "test"):
        return [
            (f"{kind}/{name}", float(value), int(event["step"]))
            for name, value in event["scores"].items()
            if value is not None and name not in ("rows", "rows_seen")
        ]
    return []
