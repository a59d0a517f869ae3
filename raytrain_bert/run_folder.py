"""The run folder: configuration, state, metrics and logs of one run."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from raytrain_bert.config.errors import ConfigError, RunFolderError

PACKAGES = ("raytrain-bert", "torch", "ray", "transformers", "tokenizers", "datasets", "pyarrow")


class StateFile:
    """A JSON file of fields that is whole at any moment; one process writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Any]:
        """What it holds; nothing where there is none.

        Raises:
            RunFolderError: it is not readable.
        """
        try:
            content: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise RunFolderError(f"{self.path}: not readable ({error}).") from None
        return content

    def update(self, **fields: Any) -> None:
        """Set fields."""
        temporary = self.path.with_suffix(".tmp")
        text = json.dumps(self.read() | fields, indent=1, allow_nan=False, ensure_ascii=False)
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, self.path)


class RunFolder:
    """Paths and files of RUN; the driver alone writes run.json and metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_path = path / "config.yaml"
        self.state_path = path / "run.json"
        self.metrics_path = path / "metrics.jsonl"
        self.log_path = path / "logs" / "ray.log"
        self.error_path = path / "logs" / "error.txt"
        self.ray_path = path / "logs" / "ray"
        """Ray Train's own notes of the run; nothing reads them when it has ended."""
        self.model_path = path / "model"
        self.replaced_path = path.with_name(f".{path.name}.replaced")
        """Where the run that is written over waits until the new one has begun to train."""

    @classmethod
    def for_new_run(cls, storage_path: str, name: str, *, overwrite: bool) -> RunFolder:
        """The folder of a new run, not made yet; a used one is refused unless it may be written over.

        Raises:
            RunFolderError: the folder is used.
        """
        if "://" in storage_path:
            raise ConfigError(f"output.storage_path {storage_path}: give a local or shared folder, not a URI.")
        if Path(name).name != name or name == "..":
            raise ConfigError(f"output.name {name!r}: a plain name is needed; the folder goes to output.storage_path.")
        folder = cls(Path(storage_path).expanduser().resolve() / name)
        if folder.path.exists() and (not folder.path.is_dir() or any(folder.path.iterdir())):
            ours = folder.config_path.is_file() and folder.state_path.is_file()
            if not (overwrite and ours):
                raise RunFolderError(
                    f"{folder.path} is used. Go on with --resume {folder.path}, start anew with --overwrite, or choose "
                    "another --output.name."
                    if ours
                    else f"{folder.path} holds something that is no run of ours. Choose another --output.name."
                )
            folder.refuse_running()
        return folder

    @classmethod
    def to_resume(cls, path: str) -> RunFolder:
        """The folder of a run that is to go on.

        Raises:
            RunFolderError: it is no run folder, or its run has finished or is still running.
        """
        folder = cls(Path(path).expanduser().resolve())
        if not folder.config_path.is_file() or not folder.state_path.is_file():
            raise RunFolderError(f"{folder.path} is no run folder (config.yaml and run.json are not there).")
        if folder.state().get("status") == "finished":
            raise RunFolderError(
                f"The run in {folder.path} has finished; its model is in {folder.model_path}. To train that model "
                f"further, begin a new run with --model.name {folder.model_path}."
            )
        folder.refuse_running()
        return folder

    def create(self, config_yaml: str, **fields: Any) -> None:
        """Make the folder of a new run, with the fields of its run.json; what is written over is put aside.

        Raises:
            RunFolderError: another run made it at the same moment.
        """
        if self.path.exists() and any(self.path.iterdir()):
            if self.replaced_path.exists():  # the last attempt to write over it died: what it put aside still counts
                shutil.rmtree(self.path)
            else:
                os.replace(self.path, self.replaced_path)
        try:
            self.path.mkdir(parents=True, exist_ok=self.path.exists() and not any(self.path.iterdir()))
        except FileExistsError:
            raise RunFolderError(f"{self.path} was made by another run just now. Try again.") from None
        self.log_path.parent.mkdir()
        self.config_path.write_text(config_yaml, encoding="utf-8")
        self.update(status="preparing", **fields)

    def give_up(self) -> None:
        """Take away the folder of a run that never began to train; what it was to write over comes back."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.replaced_path.exists():
            os.replace(self.replaced_path, self.path)

    def begin(self, **fields: Any) -> None:
        """Training begins: set fields of run.json; what was put aside goes."""
        self.update(status="running", **fields)
        shutil.rmtree(self.replaced_path, ignore_errors=True)

    def state(self) -> dict[str, Any]:
        """What run.json holds."""
        return StateFile(self.state_path).read()

    def update(self, **fields: Any) -> None:
        """Set fields of run.json; the file is whole at any moment."""
        StateFile(self.state_path).update(**fields)

    def write_confusion(self, labels: Sequence[str], matrix: Sequence[Sequence[int]]) -> None:
        """Write the test's confusion matrix, a line for each true label."""
        rows = ",\n  ".join(json.dumps(list(row)) for row in matrix)
        text = f'{{"labels": {json.dumps(list(labels), ensure_ascii=False)},\n "matrix": [\n  {rows}\n ]}}\n'
        (self.path / "confusion.json").write_text(text, encoding="utf-8")

    def append_metrics(self, lines: Iterable[str]) -> None:
        """Add lines to metrics.jsonl."""
        with self.metrics_path.open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)

    def cut_metrics(self, step: int) -> list[dict[str, Any]]:
        """Drop the records after `step`: a resumed run writes them again. Gives those that were dropped."""
        kept: list[tuple[str, dict[str, Any]]] = []
        dropped: list[tuple[str, dict[str, Any]]] = []
        for line in self._metric_lines():
            try:
                record = json.loads(line)
                (kept if record["step"] <= step else dropped).append((line, record))
            except (ValueError, KeyError, TypeError):  # the last line of a killed run may be half written
                continue
        temporary = self.metrics_path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line, _ in kept), encoding="utf-8")
        os.replace(temporary, self.metrics_path)
        return [record for _, record in dropped]

    def last_recorded_step(self) -> int:
        """The last optimizer step that metrics.jsonl tells of; 0 for none."""
        steps = [0]
        for line in self._metric_lines():
            try:
                record = json.loads(line)
                if record["kind"] == "train":
                    steps.append(int(record["step"]))
            except (ValueError, KeyError, TypeError):
                continue
        return max(steps)

    def records(self, kind: str) -> list[dict[str, Any]]:
        """The records of metrics.jsonl of one kind, in order."""
        found = []
        for line in self._metric_lines():
            try:
                record = json.loads(line)
                if record["kind"] == kind:
                    found.append(record)
            except (ValueError, KeyError, TypeError):  # the last line of a killed run may be half written
                continue
        return found

    def newest_records(self, most_bytes: int = 65_536) -> list[dict[str, Any]]:
        """The last records of metrics.jsonl, without reading all of it."""
        try:
            with self.metrics_path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - most_bytes))
                lines = file.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return []
        records = []
        for line in lines[1 if size > most_bytes else 0 :]:
            try:
                records.append(json.loads(line))
            except ValueError:
                continue
        return [record for record in records if isinstance(record, dict)]

    def speed(self) -> float | None:
        """Training rows a second of the last steps."""
        steps = [record for record in self.newest_records() if record.get("kind") == "train"][-50:]
        seconds = sum(record["seconds"] for record in steps)
        return round(sum(record["rows"] for record in steps) / seconds, 2) if seconds else None

    def last_checkpoint(self) -> int | None:
        """Step of the last checkpoint that the driver has noted, all steps before it being in metrics.jsonl."""
        name = self.state().get("last_checkpoint")
        return None if name is None else int(name.removeprefix("step-"))

    def remove_leftovers(self) -> None:
        """Remove the temporary files of a run that has ended, however it ended."""
        temporary = [*self.path.glob("*.tmp"), *self.path.glob(".*.tmp"), *self.path.glob("checkpoints/.*.tmp")]
        for path in [path for path in (*temporary, self.ray_path) if path.exists()]:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _metric_lines(self) -> list[str]:
        if not self.metrics_path.is_file():
            return []
        return self.metrics_path.read_text(encoding="utf-8", errors="replace").splitlines()

    def refuse_running(self) -> None:
        """Refuse a folder whose run is alive on this machine."""
        refuse_running(self.path, self.state())


def refuse_running(path: Path, state: dict[str, Any]) -> None:
    """Refuse a folder whose run or sweep is alive on this machine, by the state that was written down.

    Raises:
        RunFolderError: it is alive.
    """
    pid = state.get("pid")
    if state.get("status") not in ("preparing", "running") or state.get("host") != socket.gethostname() or not pid:
        return
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return
    except PermissionError:
        pass
    if _is_zombie(pid):
        return
    if pid != os.getpid():
        raise RunFolderError(f"The run in {path} is still going on (process {pid}).")


def provenance(command: list[str]) -> dict[str, Any]:
    """Where a run comes from: command, versions, git commit, machine, time."""
    return {
        "command": command,
        "versions": {"python": sys.version.split()[0]} | {name: _version(name) for name in PACKAGES},
        "git_commit": _git_commit(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": now(),
    }


def now() -> str:
    """The time, as ISO 8601 in UTC."""
    return datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds")


def _is_zombie(pid: int) -> bool:
    """Whether a process has ended and only its parent has not looked yet."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0] == "Z"
        )
    except (OSError, IndexError):
        return False


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Commit of the working directory's repository, with + where it has changes."""
    try:
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 10, "check": True}
        commit: str = subprocess.run(["git", "rev-parse", "HEAD"], **options).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], **options).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if changed else "")
