"""The driver's side of a run: Ray Train in a thread, the screen and the signals in this one."""

from __future__ import annotations

import re
import signal
import textwrap
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

from raytrain_bert.config.errors import UserError
from raytrain_bert.config.schema import Config
from raytrain_bert.job import DATASET, Job
from raytrain_bert.progress.board import DriverBoard
from raytrain_bert.progress.events import to_json_line
from raytrain_bert.progress.screen import Screen
from raytrain_bert.run_folder import RunFolder
from raytrain_bert.worker import train_loop_per_worker

if TYPE_CHECKING:
    from raytrain_bert.data.prepare import PreparedData
    from raytrain_bert.runtime import WorkerPlan

SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_OF_SILENCE = 30
ERROR_LINE = re.compile(r"[\w.]*(Error|Exception)\w*: ")
LONGEST_ESSENCE = 300


def fit(
    job: Job,
    board: DriverBoard,
    data: PreparedData,
    workers: WorkerPlan,
    config: Config,
    folder: RunFolder,
    watch: Watch,
) -> dict[str, Any]:
    """Train on the workers while this thread keeps the screen; gives rank 0's result."""
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    per_worker = {"CPU": float(workers.cpus_per_worker)} | ({"GPU": 1.0} if workers.use_gpu else {})
    trainer = TorchTrainer(
        cast(Any, train_loop_per_worker),
        train_loop_config={"job": job},
        torch_config=TorchConfig(backend=workers.backend, timeout_s=round(config.scaling.timeout_minutes * 60)),
        scaling_config=ray.train.ScalingConfig(
            num_workers=workers.num_workers,
            use_gpu=workers.use_gpu,
            resources_per_worker=per_worker if workers.num_workers else None,
        ),
        datasets={DATASET: data.dataset},
        # Every worker sees all rows and takes those that the plan deals to its rank: splitting would drop some.
        dataset_config=ray.train.DataConfig(datasets_to_split=[]),
        run_config=ray.train.RunConfig(name="ray_train", storage_path=str(folder.log_path.parent)),
    )
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(cast(Any, trainer.fit()).return_value)
        except BaseException as error:  # handed to the main thread
            outcome.append(error)

    thread = threading.Thread(target=work, name="ray-train-fit", daemon=True)
    asked = False
    with Signals() as signals:
        thread.start()
        while thread.is_alive():
            thread.join(SECONDS_BETWEEN_LOOKS)
            watch.take(board)
            if signals.received and not asked:
                asked = True
                board.request_stop(signals.received)
                watch.screen.note("stopping after this step and saving; once more stops at once, without saving")
        watch.take(board)
    if isinstance(outcome[0], BaseException):
        raise cause(outcome[0])
    return outcome[0]  # type: ignore[no-any-return]


class Signals:
    """Ctrl-C and SIGTERM while inside: the first one asks for a stop, the second stops at once."""

    def __init__(self) -> None:
        self.received: str | None = None

    def __enter__(self) -> Signals:
        self.before = {number: signal.signal(number, self.receive) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Only take note: a handler may come in the middle of anything."""
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name


class WorkersFailed(Exception):
    """Workers raised or died: a line each. What Ray has to say is the cause of this error."""


def cause(error: BaseException) -> BaseException:
    """The worker's own error, where the user can fix it; else what went wrong on each worker, in short."""
    failures: dict[int, BaseException] = getattr(error, "worker_failures", {})
    for failure in [error, *failures.values()]:
        seen: BaseException | None = failure
        while seen is not None:
            if isinstance(seen, UserError):
                return seen
            seen = getattr(seen, "cause", None) or seen.__cause__
    if not failures:
        return error
    failed = WorkersFailed("\n".join(f"worker {rank}: {essence(str(failures[rank]))}" for rank in sorted(failures)))
    failed.__cause__ = error
    return failed


def essence(text: str) -> str:
    """The line of a traceback, or of another account of a failure, that names the error."""
    lines = [line for line in text.splitlines() if line.strip()] or ["no word of it"]
    named = [line for line in lines if ERROR_LINE.match(line)]
    return textwrap.shorten((named or lines)[-1], LONGEST_ESSENCE, placeholder=" ...")


class Watch:
    """Events from the workers: to the screen, to metrics.jsonl, and the time each part takes."""

    def __init__(self, screen: Screen, folder: RunFolder, started: float) -> None:
        self.screen, self.folder = screen, folder
        self.started, self.last_news = started, time.monotonic()
        self.ready = False
        self.seconds = {"start-up": 0.0, "training": 0.0, "validation": 0.0, "checkpoints": 0.0, "test": 0.0}
        self.rows = self.tokens = self.padded_tokens = 0

    def take(self, board: DriverBoard) -> None:
        """Deal with what has been posted since the last call."""
        events = board.take()
        for event in events:
            self.note(event)
            self.screen.handle(event)
        lines = [to_json_line(line) for event in events for line in metric_lines(event)]
        if lines:
            self.folder.append_metrics(lines)
        if events:
            self.last_news = time.monotonic()
        elif not self.ready and time.monotonic() - self.last_news > SECONDS_OF_SILENCE:
            self.last_news = time.monotonic()
            if text := waiting_for_resources():
                self.screen.note(text)

    def note(self, event: dict[str, Any]) -> None:
        """Keep count of times and tokens."""
        kind, seconds = event["event"], event.get("seconds", 0.0)
        if kind == "ready":
            self.ready = True
            self.seconds["start-up"] = time.monotonic() - self.started
        elif kind == "started":
            self.folder.cut_metrics(event["step"])
        elif kind == "steps":
            self.seconds["training"] += seconds
            self.rows += sum(record["rows"] for record in event["records"])
            self.tokens += sum(record["tokens"] for record in event["records"])
            self.padded_tokens += sum(record["padded_tokens"] for record in event["records"])
        elif kind in ("validation", "test"):
            self.seconds[kind] += seconds
        elif kind == "checkpoint":
            self.seconds["checkpoints"] += seconds
            self.folder.update(last_checkpoint=Path(event["path"]).name)

    def split_of_time(self) -> dict[str, float]:
        """Wall time in seconds, by part and in all."""
        parts = {name: round(value, 2) for name, value in self.seconds.items()}
        return parts | {"total": round(time.monotonic() - self.started, 2)}

    def speed(self) -> dict[str, float | None]:
        """Rows and real tokens a second of training time, and the share of padding."""
        seconds = self.seconds["training"]
        return {
            "rows_per_second": round(self.rows / seconds, 2) if seconds else None,
            "tokens_per_second": round(self.tokens / seconds, 1) if seconds else None,
            "padding": round(1 - self.tokens / self.padded_tokens, 4) if self.padded_tokens else None,
        }


def waiting_for_resources() -> str | None:
    """What the workers wait for; None when they have their places and are only loading."""
    import ray
    from ray.util import placement_group_table

    asked = [group for group in placement_group_table().values() if group["state"] == "PENDING"]
    if not asked:
        return None
    bundles = [bundle for group in asked for bundle in group["bundles"].values()]
    wanted = " + ".join(", ".join(f"{amount:g} {name}" for name, amount in bundle.items()) for bundle in bundles)
    free, total = ray.available_resources(), ray.cluster_resources()
    there = ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
    return (
        f"waiting for room for the workers ({wanted}); free: {there}. "
        "Other jobs hold the rest: wait for them, or lower --scaling.num-workers."
    )


def metric_lines(event: dict[str, Any]) -> list[dict[str, Any]]:
    """What of an event goes to metrics.jsonl: one flat record per step, validation and test."""
    kind = event["event"]
    if kind == "steps":
        return [{"kind": "train", **record} for record in event["records"]]
    if kind in ("validation", "test"):
        return [{"kind": kind, "step": event["step"], "epoch": event["epoch"], **event["scores"]}]
    return []
