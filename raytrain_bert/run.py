"""One training run, from a configuration to the workers' result; `train` and `tune` share it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrain_bert import runtime
from raytrain_bert.config.errors import ConfigError
from raytrain_bert.config.schema import Config
from raytrain_bert.driver import fit
from raytrain_bert.gauges import Gauges
from raytrain_bert.job import Job, Purpose
from raytrain_bert.model_card import model_card
from raytrain_bert.progress.board import BoardClient, DriverBoard, LocalBoard, RemoteBoard, start_board_actor
from raytrain_bert.progress.screen import Screen
from raytrain_bert.run_folder import RunFolder, now
from raytrain_bert.trackers import Guarded, Listener, make_trackers
from raytrain_bert.watch import Watch

if TYPE_CHECKING:
    from raytrain_bert.data.prepare import PreparedData
    from raytrain_bert.runtime import Node, WorkerPlan

DEFAULT_MAX_LENGTH = 512


def data_name(config: Config) -> str:
    """A short name of the training data, for the run folder."""
    first = config.data.train[0]
    name = Path(first.partition(":")[2] if first.startswith(("bundled:", "hf:")) else first.rstrip("/*")).name
    return re.sub(r"[^\w-]+", "-", name.partition(".")[0]).strip("-") or "run"


def start(config: Config, node: Node, screen: Screen, name: str) -> tuple[Any, int, str | None]:
    """Start Ray and load the tokenizer, one beside the other; gives (tokenizer, longest input, dashboard).

    `name` is that of the job in Ray's dashboard.
    """
    address = runtime.cluster_address(config.scaling)
    screen.phase(f"joining the Ray cluster at {address}" if address else "starting Ray")
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load_text_side, config)
        # In the main thread: Ray's processes end with the thread that started them.
        dashboard = runtime.start_ray(config.scaling, node, name)
        tokenizer, longest = loading.result()
    return tokenizer, longest, dashboard


def load_text_side(config: Config) -> tuple[Any, int]:
    """The tokenizer, and the longest input that the model takes."""
    from raytrain_bert.model.build import load_tokenizer, longest_input

    tokenizer = load_tokenizer(config.model)
    return tokenizer, longest_input(config.model, tokenizer)


def prepare(config: Config, tokenizer: Any, longest: int, screen: Screen) -> PreparedData:
    """Read and tokenise the data."""
    from raytrain_bert.data.prepare import prepare_data

    return prepare_data(config.data, tokenizer, max_length(config, longest), screen.phase)


def max_length(config: Config, longest: int) -> int:
    """Longest input of the run in tokens: as set, else the model's limit but not over 512."""
    wanted = config.data.max_length
    if wanted is not None and wanted > longest:
        raise ConfigError(f"data.max_length {wanted}: {config.model.name} takes at most {longest} tokens.")
    return wanted or min(longest, DEFAULT_MAX_LENGTH)


def make_job(
    config: Config,
    folder: RunFolder,
    data: PreparedData,
    workers: WorkerPlan,
    max_length: int,
    board: BoardClient,
    weights: tuple[float, ...] | None,
    purpose: Purpose = "run",
    *,
    on_validation_too: bool = False,
    stop_after_epochs: float | None = None,
    ingredients: tuple[str, ...] = (),
) -> Job:
    """What the workers get."""
    from raytrain_bert.model.build import resolve_model

    # Workers run in a folder of Ray's, so a model folder is named by its absolute path.
    model = config.model.model_copy(update={"name": resolve_model(config.model.name)})
    return Job(
        config=config.model_copy(update={"model": model}),
        label_names=data.labels.names,
        max_length=max_length,
        threads=workers.cpus_per_worker,
        use_gpu=workers.use_gpu,
        run_folder=str(folder.path),
        board=board,
        files=data.files,
        class_weights=weights,
        purpose=purpose,
        on_validation_too=on_validation_too,
        stop_after_epochs=stop_after_epochs,
        ingredients=ingredients,
    )


@dataclass(frozen=True)
class Trained:
    """What a run has come to."""

    result: dict[str, Any]
    """Of rank 0."""
    watch: Watch
    max_length: int
    """Longest input in tokens."""


def train_on(
    data: PreparedData,
    config: Config,
    folder: RunFolder,
    workers: WorkerPlan,
    longest: int,
    screen: Screen,
    *,
    started: float,
    resumed: bool = False,
    purpose: Purpose = "run",
    on_validation_too: bool = False,
    stop_after_epochs: float | None = None,
    ingredients: tuple[str, ...] = (),
    on_board: Callable[[DriverBoard], None] = lambda board: None,
    name: str | None = None,
    sweep: str = "",
    sample: Mapping[str, Any] | None = None,
) -> Trained:
    """Train on data that has been read and tokenised; Ray is up, and the run folder is there.

    Args:
        data: token rows of every split.
        config: the resolved configuration.
        folder: of the run.
        workers: who trains.
        longest: longest input that the model takes, in tokens.
        screen: told everything that happens.
        started: time.monotonic() at the start of the program.
        resumed: go on from the folder's newest checkpoint.
        purpose: what the run is for.
        on_validation_too: train on the validation rows as well.
        stop_after_epochs: end there, on the learning rates of the whole schedule.
        ingredients: checkpoint folders of a soup.
        on_board: given the board by which the workers can be asked to stop.
        name: what the run is called in metrics and trackers; None for its folder's name.
        sweep: the sweep that it belongs to.
        sample: its sampled values.
    """
    weights = class_weights(config.train.class_weights, data)
    if resumed:
        forget_unrecorded(folder, screen)
    folder.begin(
        labels=list(data.labels.names),
        rows=data.num_rows,
        data_fingerprint=data.fingerprint,
        files=len(data.files),
    )
    board = RemoteBoard(start_board_actor()) if workers.num_workers else LocalBoard()
    on_board(board)
    length = max_length(config, longest)
    job = make_job(
        config,
        folder,
        data,
        workers,
        length,
        board,
        weights,
        purpose,
        on_validation_too=on_validation_too,
        stop_after_epochs=stop_after_epochs,
        ingredients=ingredients,
    )
    screen.phase(starting(workers))
    screen.best_metric = config.train.best_metric
    called = name or folder.path.name
    listeners: list[Listener] = [Guarded("Ray's metrics", lambda: Gauges(called, sweep), screen.warning)]
    if purpose in ("run", "trial"):  # what is finished later has been tracked as a trial
        listeners += make_trackers(config, folder.path, called, screen.warning, sweep=sweep, sample=sample or {})
    watch = Watch(screen, folder, started, listeners)
    result: dict[str, Any] = {}
    try:
        result = fit(job, board, data, workers, config, folder, watch)
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt)
        folder.update(status="interrupted" if stopped else "failed", ended=now())
        raise
    finally:
        for listener in listeners:
            listener.close(final_scores(result))
    return Trained(result, watch, length)


def final_scores(result: Mapping[str, Any]) -> dict[str, float]:
    """The best validation and the test, for the trackers."""
    best = result.get("best") or {}
    scores = {f"best/{best['metric']}": best["score"]} if best.get("score") is not None else {}
    tested = result.get("test") or {}
    return scores | {f"test/{name}": value for name, value in tested.items() if value is not None and name != "rows"}


def class_weights(wanted: str | dict[str, float] | None, data: PreparedData) -> tuple[float, ...] | None:
    """Weight of each class in the training loss.

    balanced is rows / (classes x rows of the class), as scikit-learn's; a class without training rows weighs 1.

    Raises:
        ConfigError: names what is no label.
    """
    if wanted is None:
        return None
    names, counts = data.labels.names, data.label_counts
    if isinstance(wanted, str):
        rows = sum(counts)
        return tuple(rows / (len(names) * count) if count else 1.0 for count in counts)
    unknown = sorted(set(wanted) - set(names))
    if unknown:
        raise ConfigError(f"train.class_weights: {', '.join(unknown)} is no label; labels are {', '.join(names[:20])}.")
    return tuple(wanted.get(name, 1.0) for name in names)


def starting(workers: WorkerPlan) -> str:
    """What is being started."""
    if not workers.num_workers:
        return "starting"
    if workers.min_workers is not None:
        return f"starting {workers.min_workers} to {workers.num_workers} workers"
    return f"starting {workers.num_workers} worker{'s' if workers.num_workers > 1 else ''}"


def forget_unrecorded(folder: RunFolder, screen: Screen) -> None:
    """Take away checkpoints whose steps a killed driver never wrote down: those steps are trained again."""
    from raytrain_bert.checkpoint import CheckpointStore

    # Where metrics.jsonl is gone, its steps were written down all the same.
    recorded = max(folder.last_recorded_step(), folder.last_checkpoint() or 0)
    removed = CheckpointStore(folder.path / "checkpoints").remove_unrecorded(recorded)
    if removed:
        screen.note(f"the checkpoint of step {removed[0]:,} is newer than metrics.jsonl and is left out")


def write_result(trained: Trained, config: Config, folder: RunFolder, data: PreparedData) -> None:
    """Write what a finished run came to: confusion matrix, model card, run.json."""
    result = trained.result
    if "confusion" in result:
        folder.write_confusion(data.labels.names, result["confusion"])
    card = model_card(config, data.labels.names, data.num_rows, trained.max_length, result)
    (folder.model_path / "README.md").write_text(card, encoding="utf-8")
    folder.update(
        status="finished",
        ended=now(),
        step=result["step"],
        stopped_early=result["stopped_early"],
        skipped_steps=result["skipped_steps"],
        memory=result.get("memory"),
        best=result["best"],
        test=result.get("test"),
        seconds=trained.watch.split_of_time(),
        speed=trained.watch.speed(),
    )
