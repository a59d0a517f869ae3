"""A few steps of the job itself, by the program that will run it: speed, memory, and how long the whole will take."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.filesize import decimal as size

from raytrain_bert.batching.plan import num_steps
from raytrain_bert.checks.check import Check
from raytrain_bert.config.schema import Config
from raytrain_bert.progress.format import amount, duration
from raytrain_bert.run_folder import RunFolder

STEPS = 20
WARM_UP = 3
"""Steps that are left out: kernels are chosen and memory is taken for the first time."""
SPARE = 0.9
"""Share of a GPU's memory that micro batches may fill."""


def check_timing(config: Config, words: Sequence[str]) -> Check:
    """Train STEPS steps with these flags of `train`, and say what the whole run will take.

    Nothing of it is left. `config` is what the flags come to.
    """
    with tempfile.TemporaryDirectory() as scratch:
        own = ["--train.max-steps", str(STEPS), "--train.log-every-steps", "1", "--output.storage-path", scratch]
        own += ["--output.name", "timing", "--quiet"]
        done = subprocess.run(
            [sys.executable, "-m", "raytrain_bert.train", *words, *own], capture_output=True, text=True, check=False
        )
        run = RunFolder(Path(scratch) / "timing")
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            told = f"{STEPS} steps ended with exit code {done.returncode}: {' '.join(lines)[-400:]}"
            return Check("timing", "fault", told, "What stands there; `train` with the same flags shows it whole.")
        return judge(config, run.records("train"), run.state(), max(len(run.records("validation")), 1))


def judge(config: Config, steps: Sequence[dict[str, Any]], state: dict[str, Any], validations: int) -> Check:
    """What a short run, with its steps, run.json and number of validations, says of the whole one."""
    counted = steps[WARM_UP:] or steps
    seconds = statistics.median(step["seconds"] for step in counted)
    rows = sum(step["rows"] for step in counted) / sum(step["seconds"] for step in counted)
    tokens = sum(step["tokens"] for step in counted) / sum(step["seconds"] for step in counted)
    train, split = config.train, state["seconds"]
    planned = num_steps(state["rows"]["train"], train.global_batch_size) * train.num_epochs
    planned = min(planned, train.max_steps or planned)
    to_validate = train.num_epochs + (planned // train.validate_every_steps if train.validate_every_steps else 0)
    whole = split["start-up"] + planned * seconds + to_validate * split["validation"] / validations + split["test"]
    figures = {
        "rows_per_second": round(rows, 2),
        "tokens_per_second": round(tokens, 1),
        "seconds_per_step": round(seconds, 4),
        "seconds_to_start": split["start-up"],
        "seconds_of_the_whole_run": round(whole),
    }
    told = f"{amount(rows)} rows/s, {duration(seconds)} a step; the whole run of {planned:,} steps takes about "
    told += duration(whole)
    peak = state.get("memory")
    if peak is not None:
        figures |= peak
        told += f"; memory {size(peak['peak_bytes'])}"
        if (largest := largest_micro_batch(peak)) is not None:
            figures["largest_micro_batch"] = largest
            told += f" of {size(peak['total_bytes'])}, so micro batches may hold up to about {largest:,} tokens"
    return Check("timing", "ok", told, figures=json.loads(json.dumps(figures)))


def largest_micro_batch(memory: dict[str, int]) -> int | None:
    """Tokens that fill a GPU: what is beside weights, gradients and optimizer grows with them; None on a CPU."""
    if not memory.get("total_bytes") or not memory.get("tokens"):
        return None
    beside = memory["peak_bytes"] - memory["fixed_bytes"]
    free = SPARE * memory["total_bytes"] - memory["fixed_bytes"]
    return int(memory["tokens"] * free / beside) if beside > 0 else None
