"""Training on small made-up rows, as the distributed tests do it, and the plain PyTorch loop beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from transformers import AutoTokenizer

from raytrain_bert.batching import plan
from raytrain_bert.batching.collate import TokenRows
from raytrain_bert.checkpoint import Progress
from raytrain_bert.config.schema import Config
from raytrain_bert.data.split import SPLITS, TEST, TRAIN, VALIDATION
from raytrain_bert.job import Job
from raytrain_bert.loop import Clocks, evaluate, train_epoch
from raytrain_bert.parts import Origins, build_parts
from raytrain_bert.progress.board import LocalBoard

LABELS = ("a", "b", "c")
BATCH, EPOCHS = 8, 2
Sizes = tuple[int, int, int]
SIZES: Sizes = (45, 15, 4)
"""Rows of training (its last batch is short), validation and test."""


def make_rows(sizes: Sizes = SIZES, seed: int = 0) -> pa.Table:
    """Token rows of uneven length."""
    rng = np.random.default_rng(seed)
    rows = sum(sizes)
    lengths = rng.integers(3, 30, rows)
    split = np.repeat(np.array([TRAIN, VALIDATION, TEST], dtype=np.int8), sizes)
    return pa.table(
        {
            "input_ids": pa.array([rng.integers(5, 60, n).tolist() for n in lengths], pa.list_(pa.uint16())),
            "second_start": pa.array(np.zeros(rows, np.int32)),
            "label_id": pa.array(rng.integers(0, len(LABELS), rows).astype(np.int32)),
            "split": pa.array(split),
            "file": pa.array(np.zeros(rows, np.int32)),
            "row": pa.array(np.arange(1, rows + 1, dtype=np.int64)),
        }
    )


def make_config(model: Path, **train: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"name": str(model), "dropout": 0.0},
            "optim": {"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5},
            "train": {"num_epochs": EPOCHS, "global_batch_size": BATCH, "precision": "fp32", "log_every_steps": 3}
            | train,
        }
    )


def with_dropout(config: Config, dropout: float) -> Config:
    """The same with dropout."""
    return config.model_copy(update={"model": config.model.model_copy(update={"dropout": dropout})})


def make_parts(
    config: Config, run_folder: Path, sizes: Sizes = SIZES, weights: tuple[float, ...] | None = None, **job_fields: Any
) -> Any:
    """The parts of this rank."""
    table = make_rows(sizes)
    split = table["split"].to_numpy()
    origins = Origins(("reviews.csv",), table["file"].to_numpy(), table["row"].to_numpy())
    splits = {name: np.flatnonzero(split == number) for name, number in SPLITS.items()}
    job = Job(config, LABELS, 32, 1, False, str(run_folder), LocalBoard(), class_weights=weights, **job_fields)
    return build_parts(job, torch.device("cpu"), TokenRows(table), splits, origins)


def train_to_the_end(parts: Any, progress: Progress) -> None:
    """All the epochs that are left."""
    clocks = Clocks()
    while progress.epoch < parts.config.train.num_epochs and progress.step < parts.last_step:
        train_epoch(parts, progress, clocks)
    parts.store.wait()


def events(parts: Any, kind: str) -> list[dict[str, Any]]:
    """What was posted of this kind; takes everything off the board."""
    return [event for event in parts.job.board.take() if event["event"] == kind]


def train_on_rank(
    rank: int,
    world_size: int,
    config: Config,
    run_folder: Path,
    sizes: Sizes = SIZES,
    weights: tuple[float, ...] | None = None,
) -> dict[str, Any]:
    """Train and validate; what came of it on this rank."""
    parts, progress = make_parts(config, run_folder, sizes, weights), Progress()
    train_to_the_end(parts, progress)
    scores, _ = evaluate(parts, "validation")
    posted = parts.job.board.take()
    return {
        "records": [record for event in posted if event["event"] == "steps" for record in event["records"]],
        "epochs": [event for event in posted if event["event"] == "epoch"],
        "weights": weights_of(parts),
        "scores": scores,
    }


def weights_of(parts: Any) -> dict[str, Any]:
    """Weights by name, as arrays."""
    return {name: tensor.detach().numpy().copy() for name, tensor in parts.module.state_dict().items()}


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warmup over a tenth of the steps, whose first one already moves, then linear decay."""
    warmup = round(0.1 * steps)
    return (step + 1) / warmup if step < warmup else 1 - (step - warmup) / (steps - warmup)


def plain_loop(
    config: Config, run_folder: Path, sizes: Sizes = SIZES, class_weights: tuple[float, ...] | None = None
) -> dict[str, Any]:
    """What anyone would write: one process, whole batches, transformers' padding and schedule."""
    parts = make_parts(config, run_folder, sizes)
    weight = None if class_weights is None else torch.tensor(class_weights)
    model, tokenizer = parts.module, AutoTokenizer.from_pretrained(config.model.name)
    table = make_rows(sizes).to_pydict()
    train = [i for i, s in enumerate(table["split"]) if s == TRAIN]
    no_decay = ("bias", "LayerNorm.weight")
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if not n.endswith(no_decay)], "weight_decay": 0.1},
            {"params": [p for n, p in named if n.endswith(no_decay)], "weight_decay": 0.0},
        ],
        lr=1e-2,
        fused=False,
    )
    steps = -(-len(train) // BATCH) * EPOCHS
    lengths = np.array([len(table["input_ids"][i]) for i in train])
    records = []

    def batch_of(rows: list[int]) -> tuple[Any, torch.Tensor]:
        ids = [table["input_ids"][row] for row in rows]
        return tokenizer.pad({"input_ids": ids}, return_tensors="pt"), torch.tensor(
            [table["label_id"][r] for r in rows]
        )

    for epoch in range(EPOCHS):
        for positions in plan.global_batches(lengths, global_batch_size=BATCH, seed=0, epoch=epoch):
            inputs, labels = batch_of([train[p] for p in positions])
            loss = F.cross_entropy(model(**inputs).logits, labels, weight=weight)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            rate = 1e-2 * learning_rate_factor(len(records), steps)
            records.append((loss.item(), norm.item(), rate))
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
    model.eval()
    rows = [i for i, s in enumerate(table["split"]) if s == VALIDATION]
    with torch.no_grad():
        inputs, labels = batch_of(rows)
        logits = model(**inputs).logits
    guesses, truth = logits.argmax(-1).numpy(), labels.numpy()
    scores = {
        "accuracy": accuracy_score(truth, guesses),
        "macro_f1": f1_score(truth, guesses, average="macro"),
        "weighted_f1": f1_score(truth, guesses, average="weighted"),
        "mcc": matthews_corrcoef(truth, guesses),
        "loss": F.cross_entropy(logits, labels).item(),
    }
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    return {"records": records, "weights": weights, "scores": scores}
