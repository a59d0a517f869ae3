"""A sweep against the same trainings one after the other, and ASHA against the whole sweep.

python benchmarks/sweep.py --trials 8
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

COMMON = [
    *("--data.train", "bundled:bbc_news", "--data.max-length", "16", "--model.name", "bundled:all-minilm-l6-v2"),
    *("--data.validation-fraction", "0.2", "--data.test-fraction", "0.5"),  # 668 rows are left to training
    *("--train.num-epochs", "3", "--train.precision", "fp32", "--train.global-batch-size", "16", "--quiet"),
]
SEARCH = [
    *("--search.optim.learning-rate", "loguniform:1e-5,5e-4"),
    *("--search.optim.warmup-fraction", "uniform:0,0.2"),
]


def main() -> None:
    """Measure the three, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=8)
    trials = parser.parse_args().trials
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        count = ["--sweep.num-trials", str(trials)]
        whole = timed("tune", [*COMMON, *SEARCH, *count, "--output.name", "whole"], folder)
        records = trials_of(folder / "runs" / "whole")
        report("sweep", whole, records)
        asha = timed("tune", [*COMMON, *SEARCH, *count, "--sweep.scheduler", "asha", "--output.name", "asha"], folder)
        report("sweep with ASHA", asha, trials_of(folder / "runs" / "asha"))
        one_by_one = 0.0
        for record in records:
            flags = [word for key, value in record["sample"].items() for word in (f"--{key}", str(value))]
            one_by_one += timed("train", [*COMMON, *flags, "--output.name", f"run-{record['number']}"], folder)
        print(f"{trials} runs of train, one after the other: {one_by_one:.0f} s", flush=True)
        print(f"sweep / runs {whole / one_by_one:.2f}, ASHA / sweep {asha / whole:.2f}", flush=True)


def timed(verb: str, flags: list[str], folder: Path) -> float:
    """Wall time of a command in seconds."""
    started = time.monotonic()
    subprocess.run([sys.executable, "-m", f"raytrain_bert.{verb}", *flags], cwd=folder, check=True, stdout=sys.stderr)
    return time.monotonic() - started


def trials_of(sweep: Path) -> list[dict[str, Any]]:
    """What trials.jsonl holds."""
    return [json.loads(line) for line in (sweep / "trials.jsonl").read_text(encoding="utf-8").splitlines()]


def report(name: str, seconds: float, records: list[dict[str, Any]]) -> None:
    """A line on a sweep: its time, what its trials took, and who won."""
    best = max(records, key=lambda record: record["best_score"] or 0.0)
    stopped = sum(record["status"] == "stopped" for record in records)
    busy = sum(record["seconds"] for record in records)
    print(
        f"{name}: {seconds:.0f} s, {len(records)} trials ({stopped} stopped early) of {busy:.0f} s together, best "
        f"trial {best['number']} with {best['best_score']:.4f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
