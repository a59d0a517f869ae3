"""Train a classifier: `python -m raytrain_bert.train`."""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrain_bert import command, runtime
from raytrain_bert.config.errors import ConfigError, DataError, UserError
from raytrain_bert.config.load import dump_yaml, with_absolute_paths
from raytrain_bert.config.schema import Config
from raytrain_bert.driver import fit, stop_at_sigterm
from raytrain_bert.job import Job
from raytrain_bert.model_card import model_card
from raytrain_bert.progress.board import BoardClient, LocalBoard, RemoteBoard, start_board_actor
from raytrain_bert.progress.screen import Screen, Summary
from raytrain_bert.progress.streams import Streams, captured_streams
from raytrain_bert.run_folder import RunFolder, now, provenance
from raytrain_bert.watch import Watch

if TYPE_CHECKING:
    from raytrain_bert.data.prepare import PreparedData
    from raytrain_bert.runtime import Node, WorkerPlan

DESCRIPTION = (
    "Train a BERT-style classifier on labelled text with every GPU there is. Without any flag: BBC News with MiniLM, "
    "both from PyPI packages."
)
DEFAULT_MAX_LENGTH = 512


def main(argv: Sequence[str] | None = None) -> int:
    """Run the entry; gives the exit code."""
    started = time.monotonic()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        call = command.parse_command("train", DESCRIPTION, words)
    except UserError as error:
        command.print_error(error.title, str(error))
        return command.USER_ERROR
    if call.print_config:
        print(dump_yaml(call.config), end="")
        return command.DONE
    folder: RunFolder | None = None
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        # The libraries' own messages go to a file, in the run folder as soon as there is one.
        streams = stack.enter_context(captured_streams(None if call.verbose else Path(scratch) / "ray.log"))
        screen = Screen(streams.stdout, errors=streams.stderr, quiet=call.quiet, verbose=call.verbose, started=started)
        stack.callback(screen.close)
        stack.enter_context(runtime.own_ray())

        def body() -> int:
            nonlocal folder
            output, resumed = call.config.output, call.resume is not None
            if call.resume is not None:
                folder = RunFolder.to_resume(call.resume)
            else:
                name = output.name or f"{data_name(call.config)}-{datetime.now():%Y%m%d-%H%M%S}"
                folder = RunFolder.for_new_run(output.storage_path, name, overwrite=call.overwrite)
            return run(
                with_absolute_paths(call.config), folder, screen, streams, started=started, resumed=resumed, words=words
            )

        def error_path() -> Path | None:
            return folder.error_path if folder is not None and folder.path.is_dir() else None

        return command.guard(body, screen.error, error_path)


def data_name(config: Config) -> str:
    """A short name of the training data, for the run folder."""
    first = config.data.train[0]
    name = Path(first.partition(":")[2] if first.startswith(("bundled:", "hf:")) else first.rstrip("/*")).name
    return re.sub(r"[^\w-]+", "-", name.partition(".")[0]).strip("-") or "run"


def run(
    config: Config,
    folder: RunFolder,
    screen: Screen,
    streams: Streams,
    *,
    started: float,
    resumed: bool,
    words: Sequence[str],
) -> int:
    """One training run from files to a model folder; gives the exit code.

    Args:
        config: the resolved configuration.
        folder: where the run goes; made here unless it is resumed.
        screen: told everything that happens.
        streams: where the libraries' own messages go.
        started: time.monotonic() at the start of the program.
        resumed: go on from the folder's newest checkpoint.
        words: the command line, for run.json.

    Raises:
        UserError: nothing is left behind of a run that never began.
    """
    screen.phase("looking at this machine")
    node = runtime.local_node()
    local = runtime.cluster_address(config.scaling) is None
    if local:  # refused before anything is started
        runtime.plan_workers(config.scaling, [node])
    attempt = provenance(["raytrain-bert", "train", *words])
    if resumed:
        earlier = folder.state().get("resumed", [])
        folder.update(status="preparing", host=attempt["host"], pid=attempt["pid"], resumed=[*earlier, attempt])
    else:
        folder.create(dump_yaml(config), **attempt)
    streams.redirect_to(folder.log_path)
    try:
        tokenizer, longest, dashboard = start(config, node, screen)
        stop_at_sigterm()
        in_this_process = config.scaling.num_workers == 0
        workers = runtime.plan_workers(config.scaling, [node] if local or in_this_process else runtime.cluster_nodes())
        if config.train.precision == "fp16":
            runtime.choose_precision("fp16", "cuda" if workers.use_gpu else "cpu")
        data = prepare(config, tokenizer, longest, screen)
        if folder.state().get("data_fingerprint", data.fingerprint) != data.fingerprint:
            raise DataError(
                f"The data has changed since the run in {folder.path} began; it cannot go on with other rows."
            )
        weights = class_weights(config.train.class_weights, data)
    except (UserError, KeyboardInterrupt):
        if resumed:
            folder.update(status="interrupted")
        else:
            folder.give_up()
        raise
    except BaseException:
        folder.update(status="failed", ended=now())
        raise
    show_facts(screen, data, folder, dashboard)
    warn_of_idle_workers(config, data, workers, screen)
    if resumed:
        forget_unrecorded(folder, screen)
    folder.begin(
        labels=list(data.labels.names),
        rows=data.num_rows,
        data_fingerprint=data.fingerprint,
        files=len(data.files),
    )
    board = RemoteBoard(start_board_actor()) if workers.num_workers else LocalBoard()
    job = make_job(config, folder, data, workers, max_length(config, longest), board, weights)
    screen.phase(starting(workers))
    screen.best_metric = config.train.best_metric
    watch = Watch(screen, folder, started)
    try:
        result = fit(job, board, data, workers, config, folder, watch)
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt)
        folder.update(status="interrupted" if stopped else "failed", ended=now())
        raise
    return report(result, config, folder, data, job, screen, watch)


def start(config: Config, node: Node, screen: Screen) -> tuple[Any, int, str | None]:
    """Start Ray and load the tokenizer, one beside the other; gives (tokenizer, longest input, dashboard)."""
    address = runtime.cluster_address(config.scaling)
    screen.phase(f"joining the Ray cluster at {address}" if address else "starting Ray")
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load_text_side, config)
        # In the main thread: Ray's processes end with the thread that started them.
        dashboard = runtime.start_ray(config.scaling, node)
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
    )


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


def warn_of_idle_workers(config: Config, data: PreparedData, workers: WorkerPlan, screen: Screen) -> None:
    """Fewer rows a step than workers: the result is right, and some workers do nothing."""
    rows = min(config.train.global_batch_size, data.num_rows["train"])
    if rows < workers.num_workers:
        screen.warning(
            f"a step has {rows} rows for {workers.num_workers} workers: at least {workers.num_workers - rows} of them "
            "are idle. Raise --train.global-batch-size or lower --scaling.num-workers."
        )


def forget_unrecorded(folder: RunFolder, screen: Screen) -> None:
    """Take away checkpoints whose steps a killed driver never wrote down: those steps are trained again."""
    from raytrain_bert.checkpoint import CheckpointStore

    # Where metrics.jsonl is gone, its steps were written down all the same.
    recorded = max(folder.last_recorded_step(), folder.last_checkpoint() or 0)
    removed = CheckpointStore(folder.path / "checkpoints").remove_unrecorded(recorded)
    if removed:
        screen.note(f"the checkpoint of step {removed[0]:,} is newer than metrics.jsonl and is left out")


def show_facts(screen: Screen, data: PreparedData, folder: RunFolder, dashboard: str | None) -> None:
    """Show what was found out about the data."""
    screen.facts([*data.facts, *([("dashboard", dashboard)] if dashboard else []), ("run folder", str(folder.path))])
    for warning in data.warnings:
        screen.warning(warning)


def report(
    result: dict[str, Any],
    config: Config,
    folder: RunFolder,
    data: PreparedData,
    job: Job,
    screen: Screen,
    watch: Watch,
) -> int:
    """Write what came out, show the closing table; gives the exit code."""
    run = shlex.quote(os.path.relpath(folder.path) if folder.path.is_relative_to(Path.cwd()) else str(folder.path))
    if result["status"] == "interrupted":
        folder.update(status="interrupted", ended=now(), step=result["step"], seconds=watch.split_of_time())
        screen.closing(
            Summary(
                str(folder.path),
                status=f"interrupted and saved after step {result['step']:,}",
                command=f"python -m raytrain_bert.train --resume {run}",
                command_label="go on with",
            )
        )
        return command.INTERRUPTED
    if "confusion" in result:
        folder.write_confusion(data.labels.names, result["confusion"])
    card = model_card(config, data.labels.names, data.num_rows, job.max_length, result)
    (folder.model_path / "README.md").write_text(card, encoding="utf-8")
    folder.update(
        status="finished",
        ended=now(),
        step=result["step"],
        stopped_early=result["stopped_early"],
        skipped_steps=result["skipped_steps"],
        best=result["best"],
        test=result.get("test"),
        seconds=watch.split_of_time(),
        speed=watch.speed(),
    )
    screen.closing(
        Summary(
            str(folder.path),
            best=result["best"],
            test=result.get("test"),
            receipts=watch.receipts,
            command=f'python -m raytrain_bert.predict {run} --text "..."',
        )
    )
    return command.DONE


if __name__ == "__main__":
    sys.exit(main())
