"""After the search: the winner is tested, averaged with others, or trained anew, and its model is written."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from raytrain_bert import runtime
from raytrain_bert.config.load import dump_yaml, load_config
from raytrain_bert.config.schema import OutputConfig
from raytrain_bert.config.sweep import SweepConfig
from raytrain_bert.progress.format import SCORES, score
from raytrain_bert.progress.screen import Screen
from raytrain_bert.run import Trained, train_on, write_result
from raytrain_bert.run_folder import RunFolder, provenance
from raytrain_bert.sweep.records import SweepFolder, Trial, ranking
from raytrain_bert.sweep.resources import TrialPlan, all_workers
from raytrain_bert.sweep.space import with_sample
from raytrain_bert.sweep.state import SweepState

if TYPE_CHECKING:
    from raytrain_bert.runtime import WorkerPlan
    from raytrain_bert.sweep.trial import Shared

Kind = Literal["trial", "retrained", "soup"]
SHAPE_KEYS = ("model.name", "model.revision", "model.pooling")


@dataclass(frozen=True)
class Final:
    """The model that a sweep has come to."""

    trial: int
    """The winner's number."""
    kind: Kind
    run: RunFolder
    validation: float | None
    """The chosen metric on validation; None where those rows were trained on."""
    test: Mapping[str, Any] | None

    def fields(self, folder: SweepFolder) -> dict[str, Any]:
        """For sweep.json."""
        path = str(self.run.path.relative_to(folder.path))
        return {
            "trial": self.trial,
            "kind": self.kind,
            "path": path,
            "validation": self.validation,
            "test": self.test,
        }


class Relay(Screen):
    """Lets only phases and warnings of a run through to the sweep's screen."""

    def __init__(self, screen: Screen) -> None:
        """In front of `screen`."""
        super().__init__(None)
        self._behind = screen

    def handle(self, event: Mapping[str, Any]) -> None:
        """See Screen."""
        if event["event"] in ("phase", "warning"):
            self._behind.handle(event)

    def warning(self, text: str) -> None:
        """See Screen."""
        self._behind.warning(text)


@dataclass(frozen=True)
class Winner:
    """The best trial, and everything that its model is made with."""

    config: SweepConfig
    folder: SweepFolder
    screen: Screen
    shared: Shared
    plan: TrialPlan
    state: SweepState
    best: Trial

    def finalize(self) -> Final:
        """Test the winner, its soup, or what is trained anew with its settings, and write that model."""
        before = self.folder.state.read().get("final")
        if before is not None:
            if (kept := self.kept(before)) is not None:
                self.screen.note(f"trial {self.best.number} is still the best; its model has been tested")
                return kept
            self.screen.note("the test rows are used once more: the model is another one than before")
        if self.config.sweep.retrain_best:
            return self.retrain()
        if self.config.sweep.soup is not None and (soup := self.cook(self.config.sweep.soup)) is not None:
            return soup
        run = self.folder.trial(self.best.number)
        config = load_config({}, run.config_path)
        tokens = self.shared.tokens_for(config)
        trained = train_on(
            tokens.data, config, run, self.workers(), tokens.longest, Relay(self.screen),
            started=time.monotonic(), resumed=True, purpose="finish",
        )  # fmt: skip
        before = run.state()
        write_result(trained, config, run, tokens.data)
        run.update(seconds=before.get("seconds"), speed=before.get("speed"))  # of the training, not of the test
        return self.final("trial", run, trained)

    def kept(self, before: Mapping[str, Any]) -> Final | None:
        """The final model of an earlier session, where it is the one that would be made now."""
        run = RunFolder(self.folder.path / before["path"])
        settings = self.config.sweep
        wanted: Kind = "retrained" if settings.retrain_best else "trial"
        same = before.get("trial") == self.best.number and before.get("kind") == wanted and settings.soup is None
        if not same or not run.model_path.is_dir() or run.state().get("status") != "finished":
            return None
        return Final(self.best.number, wanted, run, before.get("validation"), before.get("test"))

    def final(self, kind: Kind, run: RunFolder, trained: Trained) -> Final:
        """What came of it."""
        result = trained.result
        validation = None if result.get("trained_on_validation") else result["best"]["score"]
        return Final(self.best.number, kind, run, validation, result.get("test"))

    def workers(self) -> WorkerPlan:
        """Workers that test the winner: as in its trial, on the cluster where one was joined."""
        workers = self.plan.workers
        if workers.num_workers == 0 and runtime.cluster_address(self.config.scaling) is not None:
            return runtime.WorkerPlan(1, workers.use_gpu, workers.cpus_per_worker)
        return workers

    def retrain(self) -> Final:
        """Train with the winner's settings and all workers of the cluster, in SWEEP/best."""
        best, on_validation_too = self.best, self.config.sweep.retrain_on_validation
        config = with_sample(self.config.base(), best.sample)
        output = OutputConfig(storage_path=str(self.folder.path), name="best")
        config = config.model_copy(update={"scaling": all_workers(config.scaling, self.plan), "output": output})
        stop_after_epochs = None
        if on_validation_too:
            # There is nothing left to choose the epoch by: up to the winner's best, on the same learning rates.
            stop_after_epochs = best.best_epoch
            config = config.model_copy(
                update={"train": config.train.model_copy(update={"early_stopping_patience": None})}
            )
        local = runtime.cluster_address(config.scaling) is None
        workers = runtime.plan_workers(config.scaling, [runtime.local_node()] if local else runtime.cluster_nodes())
        run = RunFolder(self.folder.path / "best")
        resumed = any((run.path / "checkpoints").glob("step-*")) and run.state().get("trial") == best.number
        if not resumed:
            shutil.rmtree(run.path, ignore_errors=True)
            run.create(dump_yaml(config), trial=best.number, sample=best.sample, **provenance(sys.argv[:1]))
        tokens = self.shared.tokens_for(config)
        rows = "training and validation rows" if on_validation_too else "the training rows"
        until = "" if stop_after_epochs is None else f" for {stop_after_epochs:.4g} epochs"
        self.screen.note(f"training the settings of trial {best.number} anew on {rows}{until}, in {run.path}")
        trained = train_on(
            tokens.data, config, run, workers, tokens.longest, self.screen, started=time.monotonic(),
            resumed=resumed, on_validation_too=on_validation_too, stop_after_epochs=stop_after_epochs,
        )  # fmt: skip
        if trained.result["status"] == "interrupted":
            raise KeyboardInterrupt
        write_result(trained, config, run, tokens.data)
        return self.final("retrained", run, trained)

    def cook(self, most: int) -> Final | None:
        """Average the weights of the best trials in SWEEP/soup; None where that is no better than the winner alone."""
        from raytrain_bert.checkpoint import CheckpointStore

        best = self.best
        shape = [best.sample.get(key) for key in SHAPE_KEYS]
        alike = [trial for trial in ranking(self.state.trials(), self.state.metric) if trial.best_step is not None]
        alike = [t for t in alike if t.status != "failed" and [t.sample.get(key) for key in SHAPE_KEYS] == shape][:most]
        stores = [(t, CheckpointStore(self.folder.trial(t.number).path / "checkpoints")) for t in alike]
        there = [(t, store.path(t.best_step)) for t, store in stores if t.best_step in store.steps()]
        if len(there) < 2:
            self.screen.note("soup: fewer than two trials of the same model; the winner stays as it is")
            return None
        config = with_sample(self.config.base(), best.sample)
        config = config.model_copy(update={"output": OutputConfig(storage_path=str(self.folder.path), name="soup")})
        run = RunFolder(self.folder.path / "soup")
        shutil.rmtree(run.path, ignore_errors=True)
        run.create(dump_yaml(config), **provenance(sys.argv[:1]))
        tokens = self.shared.tokens_for(config)
        trained = train_on(
            tokens.data, config, run, self.workers(), tokens.longest, Relay(self.screen), started=time.monotonic(),
            purpose="soup", ingredients=tuple(str(path) for _, path in there),
        )  # fmt: skip
        numbers = [trial.number for trial, _ in there]
        soup = trained.result["soup"]
        chosen = [numbers[place] for place in soup["chosen"]]
        self.folder.state.update(soup=soup | {"trials": numbers, "chosen": chosen})
        if not trained.result["won"]:
            metric = SCORES[self.state.metric]
            self.screen.note(
                f"soup of {len(there)} trials: {metric} {score(soup['score'])}, no better than the winner alone"
            )
            shutil.rmtree(run.path, ignore_errors=True)
            return None
        write_result(trained, config, run, tokens.data)
        return self.final("soup", run, trained)
