"""Send a command to a Ray cluster as a job: `raytrain-bert submit train --config ...`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import itertools
import logging
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.filesize import decimal as size

from raytrain_bert import command
from raytrain_bert.config.errors import ConfigError, ResourceError, RunFolderError
from raytrain_bert.config.load import read_mapping

DESCRIPTION = (
    "Send a command of this program to a Ray cluster as a job, follow its log, and end with its exit code. The folder "
    "goes along (less what .gitignore and the runtime environment leave out); everything after VERB belongs to the job."
)
VERBS = ("train", "tune", "predict", "doctor", "drill")
DEFAULT_ADDRESS = "http://127.0.0.1:8265"
RUNTIME_ENV = "runtime_env.yaml"
LARGE_UPLOAD = 50 * 2**20
"""Bytes from which the largest entries of an upload are named."""
LARGEST_NAMED = 5
SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_TO_BE_READY = 30
NOT_READY = "No available agent"
"""In what Ray answers while its head node is still starting."""
ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")


@dataclass(frozen=True)
class Upload:
    """What of a folder goes to the cluster."""

    folder: Path
    sizes: Mapping[str, int]
    """Bytes by top-level entry, before they are packed."""

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.sizes.values())

    def largest(self) -> str:
        """The largest entries with their sizes."""
        ordered = sorted(self.sizes.items(), key=lambda item: -item[1])[:LARGEST_NAMED]
        return ", ".join(f"{name} {size(count)}" for name, count in ordered)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the entry; gives the exit code."""
    parser = argparse.ArgumentParser(
        prog="raytrain-bert submit",
        usage="raytrain-bert submit [--address URL] [--working-dir DIR] [--runtime-env FILE] [--no-wait] VERB ...",
        description=DESCRIPTION,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--address", metavar="URL",
        help=f"Dashboard of the cluster. Default: {' or '.join(ADDRESS_VARIABLES)}, else {DEFAULT_ADDRESS}.",
    )  # fmt: skip
    parser.add_argument("--working-dir", metavar="DIR", default=".", help="Folder that goes along. Default: this one.")
    parser.add_argument(
        "--runtime-env", metavar="FILE", help=f"Ray runtime environment (YAML). Default: {RUNTIME_ENV} of that folder."
    )
    parser.add_argument("--submission-id", metavar="ID", help="Name of the job for Ray. Default: a new one.")
    parser.add_argument("--no-wait", action="store_true", help="End as soon as the job is there.")
    parser.add_argument("verb", choices=VERBS, metavar="VERB", help=f"One of {', '.join(VERBS)}.")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="Its flags.")
    arguments = parser.parse_args(list(sys.argv[1:] if argv is None else argv))
    return command.guard(lambda: submit(arguments), command.print_error, lambda: None)


def submit(arguments: argparse.Namespace) -> int:
    """Check what can be checked here, submit, and follow; gives the job's exit code."""
    folder = Path(arguments.working_dir).expanduser().resolve()
    if not folder.is_dir():
        raise RunFolderError(f"--working-dir {arguments.working_dir}: no such folder.")
    with contextlib.chdir(folder):
        check_command(arguments.verb, arguments.rest)
        environment = runtime_environment(folder, arguments.runtime_env)
    if importlib.util.find_spec("aiohttp_cors") is None:
        raise ConfigError("Jobs need Ray's dashboard packages: pip install 'raytrain-bert[dashboard]'.")
    use_token()
    logging.getLogger("ray").setLevel(logging.WARNING)
    check_size(measure(folder, environment.get("excludes") or ()))
    client = connect(arguments.address or address_here())
    words = ["python", "-m", f"raytrain_bert.{arguments.verb}", *arguments.rest]
    job = send(
        client,
        entrypoint=shlex.join(words),
        runtime_env=environment | {"working_dir": str(folder)},
        submission_id=arguments.submission_id,
        metadata={"job_name": name_of(arguments.verb, arguments.rest)},
    )
    print(f"submitted {job}: {shlex.join(words)}", flush=True)
    if arguments.no_wait:
        return command.DONE
    try:
        return asyncio.run(follow(client, job))
    except KeyboardInterrupt:
        stop = f"RAY_AUTH_MODE=token ray job stop {job} --address {client.get_address()}"
        print(f"\nNo longer following; the job goes on. Stop it (it saves first) with:\n  {stop}", file=sys.stderr)
        return command.INTERRUPTED


def check_command(verb: str, words: Sequence[str]) -> None:
    """Tell mistakes in the flags of a job before anything is sent.

    Raises:
        ConfigError: with every problem.
    """
    if verb == "train":
        command.parse_command("train", "", words)
    elif verb == "tune":
        from raytrain_bert.config.sweep import SweepConfig
        from raytrain_bert.tune import RESUMABLE_SECTIONS, split_search_flags, with_search

        rest, searched = split_search_flags(words)
        call = command.parse_command("tune", "", rest, root=SweepConfig, resumable=RESUMABLE_SECTIONS)
        with_search(call.config, searched, resumed=call.resume is not None)


def runtime_environment(folder: Path, path: str | None) -> dict[str, Any]:
    """The runtime environment of the job, without the folder.

    Raises:
        ConfigError: the file cannot be read.
    """
    if path is None and not (folder / RUNTIME_ENV).is_file():
        return {}
    environment = read_mapping(Path(path) if path is not None else folder / RUNTIME_ENV)
    if "working_dir" in environment:
        raise ConfigError(f"{path or RUNTIME_ENV}: working_dir is given by --working-dir; leave it out there.")
    return environment


def measure(folder: Path, excludes: Sequence[str]) -> Upload:
    """What Ray will pack of a folder; the rules are Ray's own (.gitignore, .rayignore, excludes, its defaults)."""
    from ray._private import ray_constants
    from ray._private.runtime_env import packaging

    sizes: dict[str, int] = {}

    def count(path: Path) -> None:
        if path.is_file():
            name = path.relative_to(folder).parts[0]
            sizes[name] = sizes.get(name, 0) + path.stat().st_size

    patterns = [*excludes, *ray_constants.get_runtime_env_default_excludes()]
    with_gitignore = os.environ.get(ray_constants.RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1"
    rules = [packaging._get_excludes(folder, patterns)]
    packaging._dir_travel(folder, rules, count, include_gitignore=with_gitignore, logger=logging.getLogger(__name__))
    return Upload(folder, sizes)


def check_size(upload: Upload) -> None:
    """Name what makes an upload large, and refuse one that Ray would refuse.

    Raises:
        ConfigError: it is larger than Ray takes.
    """
    from ray._private.runtime_env.packaging import GCS_STORAGE_MAX_SIZE

    remedy = f"Name what is not needed under `excludes` in {RUNTIME_ENV}, or in .gitignore."
    if upload.total > GCS_STORAGE_MAX_SIZE:
        raise ConfigError(
            f"{upload.folder} has {size(upload.total)} to upload, and Ray takes {size(GCS_STORAGE_MAX_SIZE)}. Largest: "
            f"{upload.largest()}. {remedy}"
        )
    print(f"uploading {size(upload.total)} of {upload.folder}", flush=True)
    if upload.total > LARGE_UPLOAD:
        print(f"warning: that is a lot. Largest: {upload.largest()}. {remedy}", file=sys.stderr)


def address_here() -> str:
    """The cluster that the environment names, or the one of this machine."""
    return next((os.environ[name] for name in ADDRESS_VARIABLES if os.environ.get(name)), DEFAULT_ADDRESS)


def use_token() -> None:
    """Let Ray's client send the token that there is; Ray decides it when it is imported."""
    has_token = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if has_token or (Path.home() / ".ray" / "auth_token").is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def connect(address: str) -> Any:
    """A client of the cluster's jobs.

    Raises:
        ResourceError: nobody answers there, or the token is not right.
    """
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(address)
    except AuthenticationError:
        raise ResourceError(
            f"The cluster at {address} wants its token. On its head node `ray get-auth-token` prints it; put it here "
            "into RAY_AUTH_TOKEN, or into the file ~/.ray/auth_token."
        ) from None
    except (ConnectionError, RuntimeError) as error:
        raise ResourceError(
            f"No Ray dashboard answers at {address} ({first_line(str(error))}). Start one with `ray start --head`, "
            "give --address, or open a tunnel: ssh -L 8265:127.0.0.1:8265 HEAD_NODE."
        ) from None


def send(client: Any, **job: Any) -> str:
    """Hand the job over; gives its id. A head node that has just started needs some seconds before it takes any.

    Raises:
        ConfigError: the cluster refuses it.
    """
    deadline = time.monotonic() + SECONDS_TO_BE_READY
    while True:
        try:
            return str(client.submit_job(**job))
        except (RuntimeError, ValueError) as error:
            if NOT_READY not in str(error) or time.monotonic() > deadline:
                raise ConfigError(f"The cluster refuses the job: {first_line(str(error))}") from None
        time.sleep(SECONDS_BETWEEN_LOOKS)


async def follow(client: Any, job: str) -> int:
    """Print the job's log until it has ended; gives the program's exit code."""
    async for text in client.tail_job_logs(job):
        print(text, end="", flush=True)
    while not (info := client.get_job_info(job)).status.is_terminal():
        await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
    code = info.driver_exit_code
    status = str(info.status.value)
    if status == "STOPPED":
        print(f"{job} was stopped", file=sys.stderr)
        return command.INTERRUPTED
    if status != "SUCCEEDED" and code is None:
        print(f"{job} has failed: {first_line(info.message or '')}", file=sys.stderr)
    return int(code) if code is not None else command.DONE if status == "SUCCEEDED" else command.FAULT


def name_of(verb: str, words: Sequence[str]) -> str:
    """What the dashboard's list of jobs calls it."""
    given = [after for word, after in itertools.pairwise(words) if word in ("--output.name", "--resume")]
    return f"{'sweep' if verb == 'tune' else verb} {Path(given[-1]).name}" if given else verb


def first_line(text: str) -> str:
    """The first line that says something."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")


if __name__ == "__main__":
    sys.exit(main())
