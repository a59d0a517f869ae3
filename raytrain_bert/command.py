"""What the entries share: flags to a configuration, errors to exit codes."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

from raytrain_bert.config.errors import ConfigError, UserError
from raytrain_bert.config.load import Root, add_flags, is_removed_later, load_begun, load_config, with_absolute_paths
from raytrain_bert.config.schema import Config
from raytrain_bert.faults import WorkerFault, WorkersFailed

DONE, FAULT, USER_ERROR, INTERRUPTED = 0, 1, 2, 130
RESUMABLE_SECTIONS = ("scaling", "checkpoint")
BESIDE_THE_RESULT = ("output", "search")
"""Sections that --auto-resume does not compare; a sweep compares its search space itself."""


@dataclass(frozen=True)
class Command(Generic[Root]):
    """One call of an entry: its configuration and how it is run."""

    config: Root
    resume: str | None
    auto_resume: bool
    overwrite: bool
    quiet: bool
    verbose: bool
    print_config: bool
    dry_run: bool


def parse_command(
    verb: str,
    description: str,
    argv: Sequence[str],
    *,
    root: type[Root] = Config,  # type: ignore[assignment]
    resumable: Sequence[str] = RESUMABLE_SECTIONS,
) -> Command[Root]:
    """Read the command line of an entry; `--help` exits here.

    Args:
        verb: name of the entry.
        description: for its help.
        argv: the words.
        root: schema of its configuration.
        resumable: sections that may change when a run is resumed.

    Raises:
        ConfigError: with every problem of flags and file.
    """
    parser = argparse.ArgumentParser(
        prog=f"raytrain-bert {verb}",
        usage=f"raytrain-bert {verb} [--config FILE] [--SECTION.SETTING VALUE ...]",
        description=description,
        epilog="Precedence: defaults < --config < flags. A value of none unsets a setting.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="Experiment file (YAML) with the settings below.")
    parser.add_argument("--resume", metavar="RUN", help="Go on with the interrupted run in this run folder.")
    parser.add_argument(
        "--auto-resume", action="store_true",
        help="Go on with the run of this --output.name where it has begun, else begin it: one command for jobs that "
        "may be stopped and submitted again.",
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="Empty a used run folder first.")
    parser.add_argument(
        "--dry-run", action="store_true",
        help="Read, check and tokenise the data, find room for the workers, show all of it, and end before training.",
    )  # fmt: skip
    parser.add_argument("--print-config", action="store_true", help="Print the resolved configuration and exit.")
    parser.add_argument("--quiet", action="store_true", help="Print only the closing table and errors.")
    parser.add_argument("--verbose", action="store_true", help="Print Ray's messages too.")
    add_flags(parser, root)
    known, unknown = parser.parse_known_args([_with_dashes(word) for word in argv])
    flags = {key: value for key, value in vars(known).items() if "." in key}
    if known.quiet and known.verbose:
        raise ConfigError("--quiet and --verbose exclude each other.")
    resume: str | None = known.resume
    if resume is not None:
        config = _resumed_config(known, flags, unknown, root, resumable)
    else:
        config = load_config(flags, known.config, unknown, root)
        if known.auto_resume:
            if known.overwrite:
                raise ConfigError("--auto-resume and --overwrite exclude each other.")
            resume, config = _resumed_if_begun(with_absolute_paths(config), resumable)
    if known.dry_run and (resume is not None or known.overwrite):  # what it made is removed at its end
        raise ConfigError("--dry-run is for a run that has not begun: leave out --resume and --overwrite.")
    modes = (known.quiet, known.verbose, known.print_config, known.dry_run)
    return Command(config, resume, known.auto_resume, known.overwrite, *modes)


def guard(
    body: Callable[[], int], show_error: Callable[[str, str], None], error_path: Callable[[], Path | None]
) -> int:
    """Run an entry's body and turn what it raises into a message and an exit code.

    Args:
        body: gives the exit code when all goes well.
        show_error: told (title, message).
        error_path: where the traceback of a fault is kept, asked for when one happens; None prints it.
    """
    try:
        return body()
    except UserError as error:
        show_error(error.title, str(error))
        return USER_ERROR
    except KeyboardInterrupt:
        show_error("interrupted", "Stopped at once; what was saved before is kept.")
        return INTERRUPTED
    except Exception as error:
        path = error_path()
        if path is None:
            traceback.print_exc()
            kept = ""
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
            kept = f"\nThe traceback is in {path}."
        name = "" if isinstance(error, (WorkerFault, WorkersFailed)) else f"{type(error).__name__}: "
        show_error("fault", f"{name}{_first_lines(str(error))}{kept}")
        return FAULT


def dashboard_row(url: str | None) -> list[tuple[str, str]]:
    """Where Ray's dashboard is, and what it asks for first; nothing where there is none."""
    return [("dashboard", f"{url} (it asks for the token that `ray get-auth-token` prints)")] if url else []


def resume_command(verb: str, run: str) -> str:
    """What the user runs to go on with an interrupted run; in a job, that is another job."""
    program = f"raytrain-bert submit {verb}" if is_removed_later(os.getcwd()) else f"python -m raytrain_bert.{verb}"
    return f"{program} --resume {run}"


def print_error(title: str, message: str) -> None:
    """Show an error before there is a screen."""
    print(f"{title}: {message}", file=sys.stderr)


def _with_dashes(word: str) -> str:
    """Let a flag be written as in YAML: --optim.learning_rate is --optim.learning-rate."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else word


def _resumed_config(
    known: argparse.Namespace,
    flags: dict[str, object],
    unknown: list[str],
    root: type[Root],
    resumable: Sequence[str],
) -> Root:
    """The interrupted run's own configuration; only what does not change its result may be set anew."""
    if known.config is not None or known.overwrite:
        raise ConfigError("--resume takes the run's own configuration; leave out --config and --overwrite.")
    fixed = [key for key in flags if key.partition(".")[0] not in resumable]
    if fixed:
        raise ConfigError(
            f"{', '.join(fixed)}: a resumed run keeps its settings; only {' and '.join(resumable)} may change."
        )
    path = Path(known.resume).expanduser() / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{known.resume} is no run folder: it has no config.yaml.")
    return load_begun(path, root, flags, unknown)


def _resumed_if_begun(config: Root, resumable: Sequence[str]) -> tuple[str | None, Root]:
    """The run folder that the output settings name, if its run has begun, and the configuration to go on with.

    Raises:
        ConfigError: there is no name to know it by, or its run was begun with other settings.
    """
    if config.output.name is None:
        raise ConfigError("--auto-resume knows the run by its name: give --output.name.")
    folder = Path(config.output.storage_path) / config.output.name
    if not (folder / "config.yaml").is_file():
        return None, config
    before = load_begun(folder / "config.yaml", type(config))
    sections = [name for name in type(config).model_fields if name not in (*resumable, *BESIDE_THE_RESULT)]
    changed = [
        f"{section}.{name}"
        for section in sections
        for name, value in getattr(config, section)
        if getattr(getattr(before, section), name) != value
    ]
    if changed:
        raise ConfigError(f"--auto-resume: the run in {folder} was begun with another {', '.join(changed)}.")
    return str(folder), before.model_copy(update={name: getattr(config, name) for name in resumable})


def _first_lines(text: str, count: int = 12) -> str:
    lines = text.strip().splitlines()
    return "\n".join(lines[-count:] if len(lines) > count else lines)
