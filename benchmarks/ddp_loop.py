"""A bare DDP loop over the very batches of a run: what the training loop is measured against.

Run it by torchrun with as many processes as the run has workers; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForSequenceClassification


def main() -> None:
    """Train the batches in the file on all ranks and print rows per second."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("batches", type=Path, help="File made by benchmarks/throughput.py.")
    parser.add_argument("--model", required=True, help="Model folder.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=3, help="Steps that are not counted.")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    with pa.ipc.open_file(arguments.batches) as reader:
        table = reader.read_all().to_pydict()
    mine: dict[int, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {}
    rows_of_step: dict[int, int] = {}
    for step, owner, ids, labels in zip(table["step"], table["rank"], table["input_ids"], table["labels"], strict=True):
        rows_of_step[step] = rows_of_step.get(step, 0) + len(ids)
        if owner == rank:
            length = max(map(len, ids))
            inputs = torch.from_numpy(np.stack([np.pad(row, (0, length - len(row))) for row in ids]).astype(np.int64))
            mask = torch.from_numpy(np.stack([np.arange(length) < len(row) for row in ids]).astype(np.int64))
            mine.setdefault(step, []).append((inputs, mask, torch.tensor(labels)))

    model = AutoModelForSequenceClassification.from_pretrained(
        arguments.model, num_labels=max(map(max, table["labels"])) + 1
    )
    model = DistributedDataParallel(model.to(device).train(), gradient_as_bucket_view=True, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    start, rows = time.perf_counter(), 0
    for step in sorted(rows_of_step):
        if step == arguments.warmup:
            dist.barrier()
            start, rows = time.perf_counter(), 0
        for index, (inputs, mask, labels) in enumerate(mine[step]):
            last = index == len(mine[step]) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                logits = model(input_ids=inputs.to(device), attention_mask=mask.to(device)).logits
                loss = F.cross_entropy(logits, labels.to(device), reduction="sum")
                (loss * dist.get_world_size() / rows_of_step[step]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        rows += rows_of_step[step]
    dist.barrier()
    seconds = time.perf_counter() - start
    if rank == 0:
        print(json.dumps({"rows": rows, "seconds": seconds, "rows_per_second": rows / seconds}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
