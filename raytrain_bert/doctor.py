"""Look at machine, cluster and job before training: `python -m raytrain_bert.doctor`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from raytrain_bert import command, runtime
from raytrain_bert.config.errors import UserError
from raytrain_bert.config.load import with_absolute_paths
from raytrain_bert.progress.format import wrap
from raytrain_bert.progress.streams import captured_streams

if TYPE_CHECKING:
    from raytrain_bert.checks.check import Check
    from raytrain_bert.config.schema import Config

DESCRIPTION = (
    "Look at this machine (packages, GPUs, CPUs, memory, disk, token), at the cluster's nodes (room, clocks, versions, "
    "shared storage, data, the way between the workers), and at twenty steps of the job itself; each line is ok, "
    "warning or fault, with what to do. All settings of `train` may follow. Exit code 0: no fault; 2: a fault."
)
STYLES = {"ok": "green", "warning": "yellow", "fault": "bold red"}
STATUS_WIDTH, NAME_WIDTH = 9, 11


def main(argv: Sequence[str] | None = None) -> int:
    """Run the entry; gives the exit code."""
    parser = argparse.ArgumentParser(
        prog="raytrain-bert doctor",
        usage="raytrain-bert doctor [--json] [--no-cluster] [--no-timing] [--config FILE] [--SECTION.SETTING ...]",
        description=DESCRIPTION,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="Print a JSON document in place of lines.")
    parser.add_argument("--no-cluster", action="store_true", help="Look at this machine only; Ray is not started.")
    parser.add_argument("--no-timing", action="store_true", help="Do not train the twenty steps.")
    arguments, words = parser.parse_known_args(list(sys.argv[1:] if argv is None else argv))

    def body() -> int:
        config = with_absolute_paths(command.parse_command("train", "", words).config)
        with ExitStack() as stack:
            scratch = stack.enter_context(tempfile.TemporaryDirectory())
            streams = stack.enter_context(captured_streams(Path(scratch) / "ray.log"))
            stack.enter_context(runtime.own_ray())
            console = Console(file=streams.stdout, highlight=False, soft_wrap=True)
            checks = look(config, words, cluster=not arguments.no_cluster, timing=not arguments.no_timing)
            return report(checks, console, as_json=arguments.json)

    return command.guard(body, command.print_error, lambda: None)


def look(config: Config, words: Sequence[str], *, cluster: bool, timing: bool) -> Iterator[Check]:
    """Everything, one after the other, as it is found out."""
    from raytrain_bert.checks.check import Check
    from raytrain_bert.checks.machine import check_machine

    yield from check_machine(config.output.storage_path)
    if not cluster:
        return
    from raytrain_bert.checks.cluster import check_cluster
    from raytrain_bert.checks.timing import check_timing

    faults = False
    try:
        runtime.start_ray(config.scaling, runtime.local_node(), "doctor")
        for check in check_cluster(config):
            faults = faults or check.status == "fault"
            yield check
    except UserError as error:
        yield Check("cluster", "fault", str(error))
        return
    finally:
        stop_ray()
    if timing and not faults:
        yield check_timing(config, words)


def stop_ray() -> None:
    """Make room for the program that is timed."""
    import ray

    if ray.is_initialized():
        ray.shutdown()


def report(checks: Iterable[Check], console: Console, *, as_json: bool) -> int:
    """Show the checks as they come, or as one JSON document; gives the exit code."""
    found = []
    for check in checks:
        found.append(check)
        if not as_json:
            show(check, console)
    faults = sum(check.status == "fault" for check in found)
    warnings = sum(check.status == "warning" for check in found)
    if as_json:
        document = {"faults": faults, "warnings": warnings, "checks": [asdict(check) for check in found]}
        console.print(json.dumps(document, indent=2, ensure_ascii=False), markup=False)
    else:
        told = [f"{faults} fault{'' if faults == 1 else 's'}"] if faults else []
        told += [f"{warnings} warning{'' if warnings == 1 else 's'}"] if warnings else []
        console.print()
        console.print(Text(", ".join(told) or "all is well", style="bold"))
    return command.USER_ERROR if faults else command.DONE


def show(check: Check, console: Console) -> None:
    """A line, and under it what to do."""
    width = console.width if console.is_terminal else None
    indent = STATUS_WIDTH + NAME_WIDTH
    head = Text(check.status.ljust(STATUS_WIDTH), style=STYLES[check.status]) + Text(check.name.ljust(NAME_WIDTH))
    body = wrap("x" * indent + check.told, width, indent=indent)[indent:]
    console.print(head + Text(body))
    if check.remedy:
        console.print(Text(" " * indent + wrap("x" * indent + f"-> {check.remedy}", width, indent=indent)[indent:]))


if __name__ == "__main__":
    sys.exit(main())
