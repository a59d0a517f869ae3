"""Train a classifier: `python -m raytrain_bert.train`."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from raytrain_bert import command, runtime
from raytrain_bert.batching.plan import num_steps
from raytrain_bert.config.errors import DataError, UserError
from raytrain_bert.config.load import dump_yaml, with_absolute_paths
from raytrain_bert.config.schema import Config
from raytrain_bert.driver import stop_at_sigterm
from raytrain_bert.progress.screen import Screen, Summary
from raytrain_bert.progress.streams import Streams, captured_streams
from raytrain_bert.run import Trained, class_weights, data_name, prepare, start, train_on, write_result
from raytrain_bert.run_folder import RunFolder, now, provenance
from raytrain_bert.trackers import check_trackers

if TYPE_CHECKING:
    from raytrain_bert.data.prepare import PreparedData
    from raytrain_bert.runtime import WorkerPlan

DESCRIPTION = (
    "Train a BERT-style classifier on labelled text with every GPU there is. Without any flag: BBC News with MiniLM, "
    "both from PyPI packages."
)


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
            config, resumed = with_absolute_paths(call.config), call.resume is not None
            if call.resume is not None:
                if call.auto_resume and RunFolder(Path(call.resume)).state().get("status") == "finished":
                    screen.note(f"the run in {call.resume} has finished already")
                    return command.DONE
                folder = RunFolder.to_resume(call.resume)
            else:
                name = config.output.name or f"{data_name(config)}-{datetime.now():%Y%m%d-%H%M%S}"
                folder = RunFolder.for_new_run(config.output.storage_path, name, overwrite=call.overwrite)
            return run(
                config, folder, screen, streams, started=started, resumed=resumed, words=words, dry_run=call.dry_run
            )

        def error_path() -> Path | None:
            return folder.error_path if folder is not None and folder.path.is_dir() else None

        return command.guard(body, screen.error, error_path)


def run(
    config: Config,
    folder: RunFolder,
    screen: Screen,
    streams: Streams,
    *,
    started: float,
    resumed: bool,
    words: Sequence[str],
    dry_run: bool = False,
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
        dry_run: end before training, and leave nothing.

    Raises:
        UserError: nothing is left behind of a run that never began.
    """
    screen.phase("looking at this machine")
    node = runtime.local_node()
    local = runtime.cluster_address(config.scaling) is None
    if local:  # refused before anything is started
        runtime.plan_workers(config.scaling, [node])
    check_trackers(config.output.trackers or ())
    runtime.check_dashboard(config.scaling)
    attempt = provenance(["raytrain-bert", "train", *words])
    if resumed:
        earlier = folder.state().get("resumed", [])
        folder.update(status="preparing", host=attempt["host"], pid=attempt["pid"], resumed=[*earlier, attempt])
    else:
        folder.create(dump_yaml(config), **attempt)
    streams.redirect_to(folder.log_path)
    try:
        tokenizer, longest, dashboard = start(config, node, screen, f"train {folder.path.name}")
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
        class_weights(config.train.class_weights, data)
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
    if dry_run:
        folder.give_up()
        screen.facts(plan_rows(config, data, workers))
        screen.note("nothing was trained and nothing is left of it: a dry run")
        return command.DONE
    trained = train_on(data, config, folder, workers, longest, screen, started=started, resumed=resumed)
    return report(trained, config, folder, data, screen)


def warn_of_idle_workers(config: Config, data: PreparedData, workers: WorkerPlan, screen: Screen) -> None:
    """Fewer rows a step than workers: the result is right, and some workers do nothing."""
    rows = min(config.train.global_batch_size, data.num_rows["train"])
    if rows < workers.num_workers:
        screen.warning(
            f"a step has {rows} rows for {workers.num_workers} workers: at least {workers.num_workers - rows} of them "
            "are idle. Raise --train.global-batch-size or lower --scaling.num-workers."
        )


def plan_rows(config: Config, data: PreparedData, workers: WorkerPlan) -> list[tuple[str, str]]:
    """What a run would do."""
    each = f"{workers.cpus_per_worker} CPU{'s' if workers.cpus_per_worker > 1 else ''}"
    each += " and a GPU" if workers.use_gpu else ""
    low = f"{workers.min_workers} to " if workers.min_workers is not None else ""
    number = "in this process" if not workers.num_workers else f"{low}{workers.num_workers}, each with {each}"
    steps = num_steps(data.num_rows["train"], config.train.global_batch_size)
    total = min(steps * config.train.num_epochs, config.train.max_steps or sys.maxsize)
    batch = f"{config.train.global_batch_size:,} rows a step over all workers"
    return [("workers", number), ("batch", batch), ("steps", f"{total:,}, {steps:,} an epoch")]


def show_facts(screen: Screen, data: PreparedData, folder: RunFolder, dashboard: str | None) -> None:
    """Show what was found out about the data."""
    screen.facts([*data.facts, *command.dashboard_row(dashboard), ("run folder", str(folder.path))])
    for warning in data.warnings:
        screen.warning(warning)


def report(trained: Trained, config: Config, folder: RunFolder, data: PreparedData, screen: Screen) -> int:
    """Write what came out, show the closing table; gives the exit code."""
    result, watch = trained.result, trained.watch
    run = shlex.quote(os.path.relpath(folder.path) if folder.path.is_relative_to(Path.cwd()) else str(folder.path))
    if result["status"] == "interrupted":
        folder.update(status="interrupted", ended=now(), step=result["step"], seconds=watch.split_of_time())
        screen.closing(
            Summary(
                str(folder.path),
                status=f"interrupted and saved after step {result['step']:,}",
                command=command.resume_command("train", run),
                command_label="go on with",
            )
        )
        return command.INTERRUPTED
    write_result(trained, config, folder, data)
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
