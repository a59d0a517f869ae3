"""Run the real program as its user does: as a process, in a folder of its own, with nobody at the keyboard."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MARKER = "RAYTRAIN_BERT_TEST"
"""Environment variable that all processes of one command inherit."""
TIMEOUT = 300.0
SECONDS_TO_END = 20.0


@dataclass(frozen=True)
class Ended:
    """A command that has ended, and what it said."""

    words: tuple[str, ...]
    folder: Path
    returncode: int
    stdout: str
    stderr: str
    seconds: float
    left_over: tuple[str, ...]
    """Processes of the command that were still there SECONDS_TO_END after it."""

    @property
    def run_folder(self) -> Path:
        """The run folder that it told."""
        return Path(re.findall(r"^run folder +(/.+)$", self.stdout, re.MULTILINE)[-1])

    def told(self) -> str:
        """Everything it said, for a failed assertion."""
        return f"$ {shlex.join(self.words)}\nexit code {self.returncode}\n{self.stdout}\n--- stderr\n{self.stderr}"


class Program:
    """A command that runs."""

    def __init__(
        self,
        command: str,
        folder: Path,
        *,
        gpus: bool = False,
        stdin: str = "",
        extra: dict[str, str] | None = None,
        before: tuple[str, ...] = (),
    ) -> None:
        """Start it.

        Args:
            command: as the README writes it, beginning with python or raytrain-bert.
            folder: its working directory; its home is in there too.
            gpus: let it see the machine's GPUs.
            stdin: its standard input, which then ends.
            extra: more of its environment.
            before: words that put it somewhere else, for example into a network namespace.
        """
        words = shlex.split(command)
        self.words, self.folder, self.marker = tuple(words), folder, uuid.uuid4().hex
        logs = folder / "commands" / self.marker
        logs.mkdir(parents=True)
        (folder / "home").mkdir(exist_ok=True)
        self.stdout_path, self.stderr_path = logs / "stdout", logs / "stderr"
        keyboard = logs / "stdin"
        keyboard.write_text(stdin, encoding="utf-8")
        self.started = time.monotonic()
        with self.stdout_path.open("wb") as out, self.stderr_path.open("wb") as err, keyboard.open("rb") as keys:
            self.process = subprocess.Popen(
                [*before, *executable(words)],
                cwd=folder,
                env=environment(folder / "home", self.marker, gpus=gpus) | (extra or {}),
                stdin=keys,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def wait_until(self, condition: Callable[[], bool], timeout: float = TIMEOUT) -> None:
        """Wait for something while it runs; a command that ends before, or takes too long, fails the test."""
        deadline = time.monotonic() + timeout
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"what was waited for never came\n{self.wait(0.1).told()}")
            time.sleep(0.02)

    def press_ctrl_c(self) -> None:
        """What a terminal does: SIGINT to every process of the foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self, timeout: float = TIMEOUT) -> Ended:
        """Wait for its end; on a timeout all its processes are killed, and the exit code tells so."""
        try:
            returncode = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            returncode = self.process.wait()
        seconds = time.monotonic() - self.started
        deadline = time.monotonic() + SECONDS_TO_END
        while (left_over := processes_of(self.marker)) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.kill()
        return Ended(
            words=self.words,
            folder=self.folder,
            returncode=returncode,
            stdout=self.stdout_path.read_text(encoding="utf-8"),
            stderr=self.stderr_path.read_text(encoding="utf-8"),
            seconds=seconds,
            left_over=tuple(left_over.values()),
        )

    def kill(self) -> None:
        """End every process of the command."""
        for pid in processes_of(self.marker):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def run(command: str, folder: Path, *, gpus: bool = False, stdin: str = "", timeout: float = TIMEOUT) -> Ended:
    """Run a command to its end; see Program."""
    return Program(command, folder, gpus=gpus, stdin=stdin).wait(timeout)


def executable(words: list[str]) -> list[str]:
    """The words with this environment's own Python and scripts."""
    if words[0] == "python":
        return [sys.executable, *words[1:]]
    return [str(Path(sys.executable).parent / words[0]), *words[1:]]


def environment(home: Path, marker: str, *, gpus: bool) -> dict[str, str]:
    """This process's environment without what would lead the command elsewhere."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "HF_", "XDG_", "COLUMNS"))}
    offline = {"HOME": str(home), "HF_HUB_OFFLINE": "1", MARKER: marker}
    return kept | offline | ({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})


def processes_of(marker: str) -> dict[int, str]:
    """Living processes of a command: pid -> command line. (Where there is no /proc, none are found.)"""
    found = {}
    sought = f"{MARKER}={marker}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if sought in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


def strict_json(text: str) -> Any:
    """Parse JSON that holds no NaN and no infinity."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def metrics(run_folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """Records of metrics.jsonl in order, of these kinds or of all."""
    lines = (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [strict_json(line) for line in lines]
    return [record for record in records if not kinds or record["kind"] in kinds]


def without_seconds(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records without the figures that no two runs share."""
    return [
        {key: value for key, value in record.items() if key not in ("seconds", "straggler_gap")} for record in records
    ]


def state(run_folder: Path) -> dict[str, Any]:
    """What run.json holds."""
    content: dict[str, Any] = strict_json((run_folder / "run.json").read_text(encoding="utf-8"))
    return content


def checkpoints(run_folder: Path) -> list[int]:
    """Steps of the checkpoints; anything else in their folder fails the test."""
    names = sorted(path.name for path in (run_folder / "checkpoints").iterdir())
    assert all(re.fullmatch(r"step-\d{8}", name) for name in names), names
    return [int(name.removeprefix("step-")) for name in names]
