"""Real gloo processes against one plain PyTorch loop: loss, gradient norm, weights and scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from transformers import AutoTokenizer, get_linear_schedule_with_warmup

from raytrain_bert.batching import plan
from raytrain_bert.batching.collate import TokenRows
from raytrain_bert.config.schema import Config
from raytrain_bert.data.split import TEST, TRAIN, VALIDATION
from tests.distributed.gloo import run_gloo
from tests.tiny import tiny_bert

LABELS = ("a", "b", "c")
BATCH, EPOCHS = 8, 2


def make_rows(seed: int = 0, rows: int = 64) -> pa.Table:
    """Token rows of uneven length; 45 train (a short last batch), 15 validation, 4 test."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 30, rows)
    split = np.array([TRAIN] * 45 + [VALIDATION] * 15 + [TEST] * (rows - 60), dtype=np.int8)
    return pa.table(
        {
            "input_ids": pa.array([rng.integers(5, 60, n).tolist() for n in lengths], pa.list_(pa.uint16())),
            "second_start": pa.array(np.zeros(rows, np.int32)),
            "label_id": pa.array(rng.integers(0, len(LABELS), rows).astype(np.int32)),
            "split": pa.array(split),
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


def make_parts(config: Config, run_folder: Path) -> Any:
    from raytrain_bert.job import Job
    from raytrain_bert.loop import SPLITS, build_parts
    from raytrain_bert.progress.board import LocalBoard

    table = make_rows()
    split = table["split"].to_numpy()
    splits = {name: np.flatnonzero(split == number) for name, number in SPLITS.items()}
    job = Job(config, LABELS, 32, 1, False, str(run_folder), LocalBoard())
    return build_parts(job, torch.device("cpu"), TokenRows(table), splits)


def train_on_rank(rank: int, world_size: int, config: Config, run_folder: Path) -> dict[str, Any]:
    from raytrain_bert.checkpoint import Progress
    from raytrain_bert.loop import evaluate, train_epoch

    parts, progress = make_parts(config, run_folder), Progress()
    for _ in range(EPOCHS):
        train_epoch(parts, progress)
    scores, _ = evaluate(parts, "validation")
    records = [r for e in parts.job.board.take() if e["event"] == "steps" for r in e["records"]]
    weights = {name: tensor.numpy() for name, tensor in parts.module.state_dict().items()}
    return {"records": records, "weights": weights, "scores": scores}


def plain_loop(config: Config, run_folder: Path) -> dict[str, Any]:
    """What anyone would write: one process, whole batches, transformers' padding and schedule."""
    parts = make_parts(config, run_folder)
    model, tokenizer = parts.module, AutoTokenizer.from_pretrained(config.model.name)
    table = make_rows().to_pydict()
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
    schedule = get_linear_schedule_with_warmup(optimizer, round(0.1 * steps), steps)
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
            loss = F.cross_entropy(model(**inputs).logits, labels)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            records.append((loss.item(), norm.item()))
            for group in optimizer.param_groups:
                group["lr"] = parts.schedule.lr_lambdas[0](len(records) - 1) * 1e-2
            optimizer.step()
    assert schedule is not None
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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return plain_loop(make_config(model), tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(("world_size", "budget"), [(1, 4096), (1, 40), (2, 4096), (2, 40), (3, 40)])
def test_training_equals_a_plain_loop(
    model: Path, expected: dict[str, Any], tmp_path: Path, world_size: int, budget: int
) -> None:
    config = make_config(model, tokens_per_micro_batch=budget)
    results = run_gloo(train_on_rank, world_size, tmp_path, config, tmp_path / "run")
    records = results[0]["records"]
    assert [r["step"] for r in records] == list(range(1, len(expected["records"]) + 1))
    np.testing.assert_allclose([(r["loss"], r["grad_norm"]) for r in records], expected["records"], rtol=1e-5)
    for name, tensor in expected["weights"].items():
        for result in results:
            np.testing.assert_allclose(result["weights"][name], tensor, rtol=1e-3, atol=1e-4, err_msg=name)
    for result in results:
        scores = result["scores"]
        assert scores["rows_seen"] == scores["rows"] == 15
        for metric in ("accuracy", "macro_f1", "weighted_f1", "mcc"):
            assert scores[metric] == expected["scores"][metric], metric
        assert scores["loss"] == pytest.approx(expected["scores"]["loss"], rel=1e-4)


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_training_row_counts_once_an_epoch(model: Path, tmp_path: Path, world_size: int) -> None:
    records = run_gloo(train_on_rank, world_size, tmp_path, make_config(model), tmp_path / "run")[0]["records"]
    for epoch in range(EPOCHS):
        assert sum(r["rows"] for r in records if r["epoch"] == epoch) == 45


def interrupted_on_rank(rank: int, world_size: int, config: Config, run_folder: Path, stop_at: int) -> dict[str, Any]:
    """Train to `stop_at`, save, and throw everything away; then start again from the checkpoint."""
    import raytrain_bert.loop as loop
    from raytrain_bert.checkpoint import Progress

    parts, progress = make_parts(config, run_folder), Progress()
    original = loop.train_step

    def counted(*arguments: Any) -> Any:
        result = original(*arguments)
        if arguments[3] + 1 == stop_at and rank == 0:
            parts.job.board.request_stop("test")
        return result

    loop.train_step = counted
    try:
        loop.train_epoch(parts, progress)
        raise AssertionError("the stop was not seen")
    except loop.Interrupted:
        pass
    finally:
        loop.train_step = original
    parts = make_parts(config, run_folder)
    progress = loop.restore(parts)
    assert progress.step == stop_at
    while progress.epoch < EPOCHS:
        loop.train_epoch(parts, progress)
    return {name: tensor.numpy() for name, tensor in parts.module.state_dict().items()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_resumed_in_mid_epoch_equals_uninterrupted_bit_for_bit_with_dropout(
    model: Path, tmp_path: Path, world_size: int
) -> None:
    config = make_config(model, log_every_steps=1)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dropout": 0.3})})
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    whole = run_gloo(train_on_rank, world_size, tmp_path / "a", config, tmp_path / "whole")
    halves = run_gloo(interrupted_on_rank, world_size, tmp_path / "b", config, tmp_path / "halves", 4)
    for name, tensor in whole[0]["weights"].items():
        assert np.array_equal(halves[0][name], tensor), name
