"""Break training on purpose and see what survives: `python -m raytrain_bert.drill CONFIG`."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from raytrain_bert import command
from raytrain_bert.config.errors import ConfigError, RunFolderError, UserError
from raytrain_bert.drill_report import Outcome, compare, read_records, table, to_json
from raytrain_bert.progress.format import duration
from raytrain_bert.run_folder import RunFolder

DESCRIPTION = (
    "Train a short job undisturbed; then again with a worker killed, with the driver killed and resumed, and with "
    "SIGTERM and resumed; compare, and print what survived and how long each recovery took. All settings of `train` "
    "may follow. Exit code 0: everything survived with the same curve; 1: something did not."
)
SECONDS_BETWEEN_LOOKS = 0.05
STEPS, CHECKPOINTS = 60, 6


@dataclass(frozen=True)
class Drill:
    """The job that is disturbed, and where everything goes."""

    words: tuple[str, ...]
    """Flags of `train`."""
    steps: int
    """Optimizer steps of the job; fewer where its epochs have fewer."""
    every: int
    """Steps between two checkpoints."""
    folder: Path
    console: Console

    def flags(self, name: str) -> list[str]:
        """Flags of one run."""
        own = {
            "--train.max-steps": self.steps,
            "--train.log-every-steps": 1,
            "--checkpoint.every-steps": self.every,
            "--output.storage-path": self.folder,
            "--output.name": name,
        }
        return [*self.words, *(word for flag, value in own.items() for word in (flag, str(value)))]

    @contextmanager
    def job(self, name: str, flags: Sequence[str]) -> Iterator[Job]:
        """Start `train` with these flags; it is ended when the context is left early."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "raytrain_bert.train", *flags], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        job = Job(process, RunFolder(self.folder / name))
        try:
            yield job
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


@dataclass(frozen=True)
class Job:
    """A training run under way."""

    process: subprocess.Popen[bytes]
    run: RunFolder

    def reaches(self, step: int) -> bool:
        """Wait until this step is written down; false where the run ends before."""
        while self.process.poll() is None:
            if self.run.last_recorded_step() >= step:
                return True
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return False


def main(argv: Sequence[str] | None = None) -> int:
    """Run the entry; gives the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="raytrain-bert drill",
        usage="raytrain-bert drill [CONFIG] [--steps N] [--faults FAULT ...] [--SECTION.SETTING VALUE ...]",
        description=DESCRIPTION,
        allow_abbrev=False,
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="Experiment file (YAML), as for train --config.")
    parser.add_argument(
        "--steps", type=int, default=STEPS, metavar="N", help="Optimizer steps of the job (%(default)s)."
    )
    parser.add_argument(
        "--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS), metavar="FAULT",
        help=f"Which of {', '.join(FAULTS)} to try (all).",
    )  # fmt: skip
    # The settings of `train` come after these, and are its own to understand.
    first = next((n for n, word in enumerate(words) if word.startswith("--") and "." in word), len(words))
    arguments = parser.parse_args(words[:first])

    def body() -> int:
        if arguments.steps < 10:
            raise ConfigError("--steps: at least 10 are needed, to have something before and after a fault.")
        flags = [*(["--config", arguments.config] if arguments.config else []), *words[first:]]
        config = command.parse_command("train", "", flags).config
        folder = Path(config.output.storage_path).expanduser().resolve() / f"drill-{datetime.now():%Y%m%d-%H%M%S}"
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise RunFolderError(f"{folder}: {error.strerror}") from None
        every = max(1, arguments.steps // CHECKPOINTS)
        drill = Drill(tuple(flags), arguments.steps, every, folder, Console(highlight=False, soft_wrap=True))
        in_this_process = config.scaling.num_workers == 0
        faults = [fault for fault in arguments.faults if not (fault == "worker" and in_this_process)]
        if faults != arguments.faults:
            drill.console.print("no worker to kill: the job runs in the driver's own process")
        return hold(drill, faults)

    return command.guard(body, command.print_error, lambda: None)


def hold(drill: Drill, faults: Sequence[str]) -> int:
    """Train undisturbed, then once with each fault; gives the exit code."""
    console, started = drill.console, time.monotonic()
    console.print(f"training {drill.steps} steps undisturbed ...")
    with drill.job("undisturbed", drill.flags("undisturbed")) as job:
        job.process.wait()
    if job.process.returncode != 0:
        raise UserError(f"the undisturbed run failed:\n{end_of(drill, 'undisturbed')}")
    expected = read_records(job.run.path)
    steps = max(step for kind, step in expected if kind == "train")
    if steps < 10:
        raise ConfigError(f"the job has {steps} steps: at least 10 are needed. Raise --train.num-epochs.")
    outcomes = []
    for fault in faults:
        what, disturb = FAULTS[fault]
        console.print(f"the same, {what} ...")
        outcomes.append(disturb(drill, what, expected, steps))
    console.print()
    console.print(table(outcomes))
    console.print()
    (drill.folder / "drill.json").write_text(to_json(outcomes, steps=steps, flags=list(drill.words)), encoding="utf-8")
    console.print(f"in {duration(time.monotonic() - started)}; runs and drill.json are in {drill.folder}")
    return command.DONE if all(outcome.passed for outcome in outcomes) else command.FAULT


def kill_worker(drill: Drill, what: str, expected: Any, steps: int) -> Outcome:
    """Kill the process of the last rank; Ray starts the group anew, and the run goes on by itself."""
    name = "worker-killed"
    with drill.job(name, drill.flags(name)) as job:
        if not job.reaches(moment(drill, steps)):
            return too_late(drill, what, name)
        victim = job.run.state()["workers"][-1]
        kill_at(victim, address_of(job.run))
        killed = time.time()
        job.process.wait()
    return judge(drill, what, name, expected, killed, job.process.returncode)


def kill_driver(drill: Drill, what: str, expected: Any, steps: int) -> Outcome:
    """Kill the driver, and resume."""
    return stop_and_resume(drill, what, "driver-killed", expected, steps, signal.SIGKILL, -signal.SIGKILL)


def send_sigterm(drill: Drill, what: str, expected: Any, steps: int) -> Outcome:
    """Send SIGTERM to the driver, as schedulers and `ray job stop` do, and resume."""
    return stop_and_resume(drill, what, "sigterm", expected, steps, signal.SIGTERM, command.INTERRUPTED)


def stop_and_resume(
    drill: Drill, what: str, name: str, expected: Any, steps: int, number: signal.Signals, exit_code: int
) -> Outcome:
    """Send a signal to the driver, see that it ends as it should, and resume."""
    with drill.job(name, drill.flags(name)) as job:
        if not job.reaches(moment(drill, steps)):
            return too_late(drill, what, name)
        job.process.send_signal(number)
        killed = time.time()
        job.process.wait()
    if job.process.returncode != exit_code:
        return Outcome(what, False, f"exit code {job.process.returncode} in place of {exit_code}")
    with drill.job(name, ["--resume", str(job.run.path)]) as job:
        job.process.wait()
    return judge(drill, what, name, expected, killed, job.process.returncode)


def judge(drill: Drill, what: str, name: str, expected: Any, killed: float, exit_code: int) -> Outcome:
    """What came of a disturbed run."""
    run = RunFolder(drill.folder / name)
    if exit_code != 0:
        drill.console.print(end_of(drill, name), style="dim")
        return Outcome(what, False, f"exit code {exit_code}; see {name}.log")
    lost, difference = compare(expected, read_records(run.path))
    state = run.state()
    return Outcome(
        what,
        survived=True,
        repeated=state.get("repeated", {}).get("steps", 0),
        lost=lost,
        difference=difference,
        seconds=max(0.0, state["training_since"] - killed),
    )


def moment(drill: Drill, steps: int) -> int:
    """The step to disturb at: past the middle, and not just after a checkpoint."""
    return steps // 2 + max(1, drill.every // 2)


def too_late(drill: Drill, what: str, name: str) -> Outcome:
    """The run had ended before it could be disturbed."""
    return Outcome(what, False, f"the run ended before the fault (see {name}.log); raise --steps")


def address_of(run: RunFolder) -> str | None:
    """The cluster that a run has joined; None for one of its own."""
    from raytrain_bert.config.load import load_config
    from raytrain_bert.runtime import cluster_address

    return cluster_address(load_config({}, run.config_path).scaling)


def kill_at(worker: dict[str, Any], address: str | None) -> None:
    """SIGKILL to a worker's process, on whatever machine of the cluster it runs."""
    if worker["host"] == socket.gethostname():
        os.kill(worker["pid"], signal.SIGKILL)
        return
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(address=address, log_to_driver=False)
    try:
        there = NodeAffinitySchedulingStrategy(node_id=worker["node"], soft=False)
        kill = ray.remote(os.kill).options(num_cpus=0, scheduling_strategy=there)
        ray.get(kill.remote(worker["pid"], int(signal.SIGKILL)))
    finally:
        ray.shutdown()


def end_of(drill: Drill, name: str, lines: int = 12) -> str:
    """The last lines that a run printed."""
    text = (drill.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
    return "\n".join(text.splitlines()[-lines:])


FAULTS: dict[str, tuple[str, Callable[[Drill, str, Any, int], Outcome]]] = {
    "worker": ("a worker killed", kill_worker),
    "driver": ("the driver killed", kill_driver),
    "sigterm": ("SIGTERM", send_sigterm),
}


if __name__ == "__main__":
    sys.exit(main())
