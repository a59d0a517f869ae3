"""The driver's side of a run: Ray Train in a thread, the screen and the signals in this one."""

from __future__ import annotations

import os
import re
import signal
import textwrap
import threading
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

from raytrain_bert.config.errors import UserError
from raytrain_bert.config.schema import Config
from raytrain_bert.faults import GaveUp, PeerLate, PeerLost, WorkerFault, WorkersFailed, is_final
from raytrain_bert.job import DATASET, Job
from raytrain_bert.progress.board import BoardClient, DriverBoard
from raytrain_bert.run_folder import RunFolder
from raytrain_bert.watch import Watch
from raytrain_bert.worker import train_loop_per_worker

if TYPE_CHECKING:
    from raytrain_bert.data.prepare import PreparedData
    from raytrain_bert.runtime import WorkerPlan

SECONDS_BETWEEN_LOOKS = 0.5
LOOKS_FOR_SIGNALS = 5
"""A signal is noticed within SECONDS_BETWEEN_LOOKS / this."""
ERROR_LINE = re.compile(r"[\w.]*(Error|Exception)\w*: ")
LONGEST_ESSENCE = 300
START_TIMEOUT_S = 15
"""Elastic training: Ray counts on a node that is just gone for a while, and tries again after so long."""
DEATHS = re.compile(
    r"process has died|actor (is )?dead|died unexpectedly|node.*(died|dead|removed)|health ?check", re.I
)


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
    timeout_s = round(config.scaling.timeout_minutes * 60)
    # Later than the workers' own patience: their error names who is late.
    os.environ.setdefault("RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S", str(timeout_s + 60))
    if workers.min_workers is not None:
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(START_TIMEOUT_S))
    trainer = TorchTrainer(
        cast(Any, train_loop_per_worker),
        train_loop_config={"job": job},
        torch_config=TorchConfig(backend=workers.backend, timeout_s=timeout_s),
        scaling_config=cast(Any, ray.train.ScalingConfig)(
            num_workers=workers.num_workers
            if workers.min_workers is None
            else (workers.min_workers, workers.num_workers),
            use_gpu=workers.use_gpu,
            resources_per_worker=per_worker if workers.num_workers else None,
            elastic_resize_monitor_interval_s=config.scaling.resize_check_seconds,
        ),
        datasets={DATASET: data.dataset},
        # Every worker sees all rows and takes those that the plan deals to its rank: splitting would drop some.
        dataset_config=ray.train.DataConfig(datasets_to_split=[]),
        run_config=ray.train.RunConfig(
            name=folder.path.name,  # in the dashboard's list of training runs
            storage_path=str(folder.ray_path),
            failure_config=ray.train.FailureConfig(max_failures=config.scaling.max_failures),
            callbacks=[failure_callback(job.board)] if workers.num_workers else None,
        ),
    )
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(cast(Any, trainer.fit()).return_value)
        except BaseException as error:  # handed to the main thread
            outcome.append(error)

    thread = threading.Thread(target=work, name="ray-train-fit", daemon=True)
    asked = False
    try:
        with Signals() as signals:
            thread.start()
            while thread.is_alive():
                for _ in range(LOOKS_FOR_SIGNALS):
                    thread.join(SECONDS_BETWEEN_LOOKS / LOOKS_FOR_SIGNALS)
                    if signals.received and not asked:
                        asked = True
                        board.request_stop(signals.received)
                        watch.screen.note(
                            "stopping after this step and saving; once more stops at once, without saving"
                        )
                watch.take(board)
            watch.take(board)
    finally:
        watch.close()
        folder.remove_leftovers()
    if isinstance(outcome[0], BaseException):
        watch.ask_who_lags(board)
        raise cause(outcome[0], watch.lag)
    tidy_checkpoints(folder, config)
    return outcome[0]  # type: ignore[no-any-return]


def tidy_checkpoints(folder: RunFolder, config: Config) -> None:
    """Leave the checkpoints that were asked for: the workers keep one more, as the driver may die."""
    from raytrain_bert.checkpoint import CheckpointStore

    CheckpointStore(folder.path / "checkpoints", config.checkpoint.num_to_keep).tidy()


def failure_callback(board: BoardClient) -> Any:
    """What Ray's controller asks when workers fail: it ends the run at once where another try would fail too.

    Ray's FailureConfig counts every failure alike; a wrong label would be trained on four times.
    """
    import ray.train

    class EndAtFaults(ray.train.UserCallback):
        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            """Called in the controller, with the errors by rank."""
            failures = {rank: root_of(error) for rank, error in worker_exceptions.items()}
            if any(is_final(error) for error in failures.values()):
                raise GaveUp(failures)
            gone = {rank: error for rank, error in failures.items() if not isinstance(error, PeerLost)}
            reasons = {str(rank): told(error) for rank, error in (gone or failures).items()}
            board.post([{"event": "lost", "reasons": reasons}])
            board.flush()

    return EndAtFaults()


class Signals:
    """Ctrl-C and SIGTERM while inside: the first one asks for a stop, the second stops at once."""

    def __init__(self) -> None:
        self.received: str | None = None

    def __enter__(self) -> Signals:
        # Elsewhere than in the main thread, as in a trial of a sweep, the signals are another's.
        ours = threading.current_thread() is threading.main_thread()
        numbers = [signal.SIGINT, signal.SIGTERM] if ours else []
        self.before = {number: signal.signal(number, self.receive) for number in numbers}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Only take note: a handler may come in the middle of anything."""
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name


def stop_at_sigterm() -> None:
    """Let SIGTERM do what Ctrl-C does, while there is nothing to save yet; Ray's own handler ends the process."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def root_of(error: BaseException) -> Exception:
    """Our own error inside what Ray makes of it; the error itself where there is none."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, (UserError, WorkerFault, GaveUp)):
            return seen
        seen = getattr(seen, "cause", None) or getattr(seen, "controller_failure", None) or seen.__cause__
    return error if isinstance(error, Exception) else RuntimeError(str(error))


def failures_of(error: BaseException) -> dict[int, Exception]:
    """The workers' errors by rank, as far as Ray tells them."""
    root = root_of(error)
    if isinstance(root, GaveUp):
        return root.failures
    failures: Mapping[int, BaseException] = getattr(error, "worker_failures", {})
    return {rank: root_of(failure) for rank, failure in failures.items()}


def cause(error: BaseException, lag: str | None = None) -> BaseException:
    """Why the run failed: a worker's own error before what it led to on others.

    Args:
        error: what Ray raised.
        lag: who the others were waiting for, where that is known.
    """
    failures = failures_of(error)
    for failure in [*failures.values(), root_of(error)]:
        if isinstance(failure, UserError):
            return failure
    if not failures:
        return root_of(error)
    # A rank whose peer is gone or late has nothing to say beside the one that failed.
    own = {rank: failure for rank, failure in failures.items() if not isinstance(failure, (PeerLost, PeerLate))}
    lines = [
        told(failure) if isinstance(failure, WorkerFault) else f"worker {rank}: {told(failure)}"
        for rank, failure in sorted((own or failures).items())
    ]
    if not own and lag is not None:
        lines.append(f"{lag}.")
    failed = WorkersFailed("\n".join(lines))
    traces = [f"worker {rank}:\n{f.trace}" for rank, f in sorted(failures.items()) if isinstance(f, WorkerFault)]
    failed.add_note("\n".join(traces))
    failed.__cause__ = error
    return failed


def told(error: Exception) -> str:
    """An error in a line or two."""
    if isinstance(error, WorkerFault):
        return str(error)
    text = essence(str(error))
    return "the process has died" if DEATHS.search(str(error)) else text


def essence(text: str) -> str:
    """The line of a traceback, or of another account of a failure, that names the error."""
    lines = [line for line in text.splitlines() if line.strip()] or ["no word of it"]
    named = [line for line in lines if ERROR_LINE.match(line)]
    return textwrap.shorten((named or lines)[-1], LONGEST_ESSENCE, placeholder=" ...")
