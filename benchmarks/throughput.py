"""Rows per second of `raytrain_bert.train` against a bare torchrun DDP loop on the same batches, turn by turn.

python benchmarks/throughput.py --workers 2 --rounds 2
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

HERE = Path(__file__).resolve().parent
WARMUP_STEPS = 3


def main() -> None:
    """Measure both sides and print one line each, then the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads for each worker.")
    parser.add_argument("--rounds", type=int, default=2, help="How often each side runs; the median counts.")
    arguments = parser.parse_args()
    flags = [
        *("--data.max-length", "128", "--data.validation-fraction", "0.35", "--data.test-fraction", "0.35"),
        *("--model.pooling", "native", "--model.dropout", "0.1", "--train.num-epochs", "1"),
        *("--train.precision", "fp32", "--train.tokens-per-micro-batch", "4096"),
        *("--scaling.num-workers", str(arguments.workers), "--scaling.cpus-per-worker", str(arguments.threads)),
    ]
    with tempfile.TemporaryDirectory() as scratch:
        batches = Path(scratch) / "batches.arrow"
        model = write_batches(flags, arguments.workers, batches)
        bare, ours = [], []
        for _ in range(arguments.rounds):
            bare.append(run_bare(batches, model, arguments.workers, arguments.threads))
            ours.append(run_ours(flags, Path(scratch)))
            print(f"bare DDP {bare[-1]:7.2f} rows/s   raytrain_bert {ours[-1]:7.2f} rows/s", flush=True)
    ratio = statistics.median(ours) / statistics.median(bare)
    print(f"raytrain_bert / bare DDP, medians of {arguments.rounds}: {ratio:.3f}")


def write_batches(flags: list[str], workers: int, path: Path) -> str:
    """Write the micro batches that a run with these flags trains on; gives its model folder."""
    import ray
    import ray.data

    from raytrain_bert.batching import plan
    from raytrain_bert.batching.collate import TokenRows
    from raytrain_bert.command import parse_command
    from raytrain_bert.data.prepare import prepare_data
    from raytrain_bert.model.build import load_tokenizer, resolve_model

    config = parse_command("train", "", flags).config
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    assert config.data.max_length is not None
    data = prepare_data(config.data, load_tokenizer(config.model), config.data.max_length)
    rows = TokenRows(pa.concat_tables(ray.get(data.dataset.to_arrow_refs())))
    train = np.flatnonzero(data.splits == 0)
    lengths = rows.lengths[train]
    table: dict[str, list[Any]] = {"step": [], "rank": [], "input_ids": [], "labels": []}
    batches = plan.global_batches(lengths, global_batch_size=config.train.global_batch_size, seed=0, epoch=0)
    for step, batch in enumerate(batches):
        for rank, share in enumerate(plan.deal(batch, lengths, workers)):
            for micro_batch in plan.micro_batches(share, lengths, config.train.tokens_per_micro_batch or 4096):
                table["step"].append(step)
                table["rank"].append(rank)
                table["input_ids"].append([ids.tolist() for ids in rows.tokens(train[micro_batch])])
                table["labels"].append(rows.label_ids[train[micro_batch]].tolist())
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, (content := pa.table(table)).schema) as writer:
        writer.write_table(content)
    ray.shutdown()
    return resolve_model(config.model.name)


def run_bare(batches: Path, model: str, workers: int, threads: int) -> float:
    """Rows per second of the bare loop."""
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}", str(HERE / "ddp_loop.py")]
    words += [str(batches), "--model", model, "--threads", str(threads), "--warmup", str(WARMUP_STEPS)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["rows_per_second"])


def run_ours(flags: list[str], scratch: Path) -> float:
    """Rows per second of a real run, from its metrics, without the first steps."""
    shutil.rmtree(scratch / "run", ignore_errors=True)
    words = [
        "-m",
        "raytrain_bert.train",
        *flags,
        "--output.storage-path",
        str(scratch),
        "--output.name",
        "run",
        "--quiet",
    ]
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (scratch / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"][WARMUP_STEPS:]
    return float(sum(line["rows"] for line in steps) / sum(line["seconds"] for line in steps))


if __name__ == "__main__":
    main()
