"""The training loop of one worker: every rank runs it alike."""

from __future__ import annotations

import math
import os
import shutil
import socket
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from raytrain_bert import parallel, runtime
from raytrain_bert.batching import plan
from raytrain_bert.batching.collate import MicroBatch, TokenRows, collate
from raytrain_bert.checkpoint import CheckpointStore, Progress, training_tensors
from raytrain_bert.config.errors import ResourceError, RunFolderError
from raytrain_bert.config.schema import Config
from raytrain_bert.data.split import SPLITS
from raytrain_bert.job import DATASET, Job
from raytrain_bert.metrics import EvaluationMetrics, is_better
from raytrain_bert.model.build import accepts_token_types, build_model, load_tokenizer, save_model
from raytrain_bert.model.layers import parameter_depth
from raytrain_bert.optim import build_optimizer, build_schedule
from raytrain_bert.step_log import StepLog

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
TOKENS_PER_MICRO_BATCH = {"cpu": 4096, "cuda": 16384}
LOG_EVERY_STEPS = {"cpu": 1, "cuda": 10}
EVALUATION_BUDGET = 2  # without activations to keep, twice the tokens fit
SECONDS_BETWEEN_NEWS = 0.5


@dataclass
class Parts:
    """Everything that the loop works with."""

    job: Job
    config: Config
    rank: int
    world_size: int
    device: torch.device
    precision: str
    rows: TokenRows
    splits: dict[str, NDArray[np.int64]]
    """Positions in `rows` of each split's rows."""
    module: PreTrainedModel
    """The model as it is."""
    model: nn.Module
    """The model as it is called in training: wrapped for data parallel training."""
    tokenizer: Any
    pad_token_id: int
    token_type_ids: bool
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    scaler: torch.amp.GradScaler
    store: CheckpointStore
    tokens_per_micro_batch: int
    steps_per_epoch: int
    total_steps: int

    def post(self, kind: str, **fields: Any) -> None:
        """Tell the driver, from rank 0."""
        if self.rank == 0:
            self.job.board.post([{"event": kind, **fields}])

    def autocast(self) -> AbstractContextManager[Any]:
        """Autocast in the run's precision."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, AUTOCAST[self.precision])


class Interrupted(Exception):
    """The user asked for a stop; a checkpoint of this moment is saved."""


def train(job: Job) -> dict[str, Any]:
    """Train, choose the best, test it and write it; every rank gets the same result."""
    if parallel.rank_and_world_size()[0] == 0:
        job.board.post([{"event": "phase", "text": "loading the model"}])
    if not (Path(job.run_folder) / "run.json").is_file():
        raise RunFolderError(
            f"{socket.gethostname()} does not see the run folder {job.run_folder}. "
            "All nodes need the same folder: set --output.storage-path to a shared one."
        )
    parts = build_parts(job, device_of(job), *load_rows())
    progress = restore(parts)
    try:
        while progress.epoch < parts.config.train.num_epochs and not progress.stopped_early:
            train_epoch(parts, progress)
            validate_and_save(parts, progress)
        return finish(parts, progress)
    except Interrupted:
        return {"status": "interrupted", "step": progress.step}
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            f"{parts.device} of {socket.gethostname()} is out of memory with micro batches of up to "
            f"{parts.tokens_per_micro_batch:,} tokens and inputs of up to {job.max_length}. Lower "
            "--train.tokens-per-micro-batch or --data.max-length, or set --model.gradient-checkpointing."
        ) from error
    finally:
        job.board.flush()


def device_of(job: Job) -> torch.device:
    """The one device of this worker; Ray lets all workers of a node see all its GPUs."""
    if not job.use_gpu:
        return torch.device("cpu")
    from ray.train.torch import get_device

    device: torch.device = get_device()
    torch.cuda.set_device(device)
    return device


def build_parts(job: Job, device: torch.device, rows: TokenRows, splits: dict[str, NDArray[np.int64]]) -> Parts:
    """Load model and optimizer on this rank."""
    config = job.config
    torch.set_num_threads(job.threads)
    rank, world_size = parallel.rank_and_world_size()
    tokenizer = load_tokenizer(config.model)
    module = build_model(config.model, job.label_names, seed=config.train.seed)
    model = parallel.parallelize(module, device, compile_model=config.model.compile)
    optimizer = build_optimizer(module.named_parameters(), parameter_depth(module), config.optim)
    steps_per_epoch = plan.num_steps(len(splits["train"]), config.train.global_batch_size)
    total_steps = steps_per_epoch * config.train.num_epochs
    precision = parallel.broadcast(runtime.choose_precision(config.train.precision, device.type))
    parts = Parts(
        job=job,
        config=config,
        rank=rank,
        world_size=world_size,
        device=device,
        precision=precision,
        rows=rows,
        splits=splits,
        module=module,
        model=model,
        tokenizer=tokenizer,
        pad_token_id=tokenizer.pad_token_id,
        token_type_ids=accepts_token_types(module, tokenizer),
        optimizer=optimizer,
        schedule=build_schedule(optimizer, config.optim, total_steps),
        scaler=torch.amp.GradScaler(device.type, enabled=precision == "fp16"),
        store=CheckpointStore(Path(job.run_folder) / "checkpoints", config.checkpoint.num_to_keep),
        tokens_per_micro_batch=config.train.tokens_per_micro_batch or TOKENS_PER_MICRO_BATCH[device.type],
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
    )
    post_ready(parts)
    return parts


def load_rows() -> tuple[TokenRows, dict[str, NDArray[np.int64]]]:
    """Token rows out of the node's object store, and the positions of each split's rows."""
    import pyarrow as pa
    import ray
    import ray.train

    # Blocks as they lie in shared memory: no copy, whatever the number of workers on the node.
    blocks = ray.get(ray.train.get_dataset_shard(DATASET).materialize().to_arrow_refs())
    table = pa.concat_tables(blocks)
    split = table["split"].to_numpy()
    return TokenRows(table), {name: np.flatnonzero(split == number) for name, number in SPLITS.items()}


def post_ready(parts: Parts) -> None:
    """Say what the workers are and what lies before them."""
    trainable = sum(p.numel() for p in parts.module.parameters() if p.requires_grad)
    parts.post(
        "ready",
        device=torch.cuda.get_device_name(parts.device) if parts.device.type == "cuda" else "CPU",
        world_size=parts.world_size,
        threads=torch.get_num_threads(),
        precision=parts.precision,
        parameters=sum(p.numel() for p in parts.module.parameters()),
        trainable_parameters=trainable,
        tokens_per_micro_batch=parts.tokens_per_micro_batch,
        steps_per_epoch=parts.steps_per_epoch,
        total_steps=parts.total_steps,
        global_batch_size=parts.config.train.global_batch_size,
    )


def restore(parts: Parts) -> Progress:
    """Go on from the newest checkpoint of the run folder, if there is one."""
    step = parallel.broadcast(parts.store.latest())
    parts.post("started", step=step or 0)
    if step is None:
        return Progress()
    parts.store.load(step, training_tensors(parts.module, parts.optimizer, parts.scaler))
    set_schedule_step(parts.schedule, step)
    return parts.store.read_progress(step)


def set_schedule_step(schedule: torch.optim.lr_scheduler.LambdaLR, step: int) -> None:
    """Put the learning rates where they are after `step` optimizer steps."""
    schedule.last_epoch = step
    for group, base, scale in zip(schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = base * scale(step)
    schedule._last_lr = [group["lr"] for group in schedule.optimizer.param_groups]


def train_epoch(parts: Parts, progress: Progress) -> None:
    """Train the steps that the epoch under way has left; ends with `progress.epoch` one up."""
    config, train_rows = parts.config, parts.splits["train"]
    lengths = parts.rows.lengths[train_rows]
    batches = plan.global_batches(
        lengths, global_batch_size=config.train.global_batch_size, seed=config.train.seed, epoch=progress.epoch
    )
    log = StepLog(
        parts.job.board,
        parts.rank,
        parts.device,
        every=config.train.log_every_steps or LOG_EVERY_STEPS[parts.device.type],
        total_steps=parts.total_steps,
    )
    parts.module.train()
    for batch in batches[progress.step_in_epoch :]:
        share = plan.deal(batch, lengths, parts.world_size)[parts.rank]
        # A rank without a row in a short batch still takes part in the gradient exchange, with weight 0.
        counted = len(share) > 0
        share = share if counted else batch[:1]
        micro_batches = [
            collate(parts.rows, train_rows[rows], pad_token_id=parts.pad_token_id, token_type_ids=parts.token_type_ids)
            for rows in plan.micro_batches(share, lengths, parts.tokens_per_micro_batch)
        ]
        learning_rate = config.optim.learning_rate * parts.schedule.lr_lambdas[0](progress.step)
        loss_sum, grad_norm = train_step(parts, micro_batches, len(batch), progress.step, counted)
        progress.step += 1
        progress.step_in_epoch += 1
        log.add(progress.epoch, progress.step, loss_sum, grad_norm, learning_rate, micro_batches if counted else [])
        last = progress.step_in_epoch == len(batches)
        if log.is_due() or last:
            log.flush()
        if last:
            break  # the caller validates, saves and looks for a stop
        validation_is_due = is_due(config.train.validate_every_steps, progress.step)
        if not (validation_is_due or log.stop_requested or is_due(config.checkpoint.every_steps, progress.step)):
            continue
        log.flush()
        if validation_is_due:
            validate_and_save(parts, progress)
            parts.module.train()
            if progress.stopped_early:
                return
        else:
            save(parts, progress)
        if log.stop_requested:
            raise Interrupted
        log.restart_clock()
    progress.epoch += 1
    progress.step_in_epoch = 0


def train_step(
    parts: Parts, micro_batches: list[MicroBatch], global_rows: int, step: int, counted: bool
) -> tuple[Tensor, Tensor]:
    """One optimizer step over this rank's share of a global batch; gives (sum of its losses, gradient norm).

    The loss is the mean over the rows of the whole global batch, whatever the number of workers and micro batches:
    each rank sums over its rows, and DDP's mean over ranks is undone by the factor world_size.
    """
    seed_dropout(parts.config.train.seed, step, parts.rank)
    scale = parts.world_size / global_rows if counted else 0.0
    total = torch.zeros((), device=parts.device, dtype=torch.float64)
    for index, micro_batch in enumerate(micro_batches):
        batch = micro_batch.to(parts.device)
        with parallel.gradient_sync(parts.model, enabled=index == len(micro_batches) - 1):
            with parts.autocast():
                logits = parts.model(**batch.inputs()).logits
            loss_sum = F.cross_entropy(logits.float(), batch.labels, reduction="sum")
            parts.scaler.scale(loss_sum * scale).backward()
        if counted:
            total += loss_sum.detach()
    parts.scaler.unscale_(parts.optimizer)
    parameters = [p for group in parts.optimizer.param_groups for p in group["params"]]
    limit = parts.config.optim.max_grad_norm
    grad_norm = nn.utils.clip_grad_norm_(parameters, math.inf if limit is None else limit)
    parts.scaler.step(parts.optimizer)
    parts.scaler.update()
    parts.schedule.step()
    parts.optimizer.zero_grad(set_to_none=True)
    return total, grad_norm


def seed_dropout(seed: int, step: int, rank: int) -> None:
    """Make this step's random numbers a function of (seed, step, rank): a resumed run needs no stored state."""
    torch.manual_seed(int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0] >> 1))


def is_due(every: int | None, step: int) -> bool:
    """Whether something that happens every so many steps happens after this one."""
    return every is not None and step % every == 0


@torch.no_grad()
def evaluate(parts: Parts, split: str) -> tuple[dict[str, Any], Tensor]:
    """Scores over every row of a split, each counted once over all ranks, and the confusion matrix.

    The same on every rank; the matrix is (classes, classes), true labels down, predicted ones across.
    """
    parts.module.eval()
    metrics = EvaluationMetrics(len(parts.job.label_names), parts.device)
    positions = parts.splits[split]
    lengths = parts.rows.lengths[positions]
    share = plan.evaluation_share(lengths, rank=parts.rank, world_size=parts.world_size)
    done, told = 0, time.monotonic()
    for rows in plan.micro_batches(share, lengths, EVALUATION_BUDGET * parts.tokens_per_micro_batch):
        batch = collate(
            parts.rows, positions[rows], pad_token_id=parts.pad_token_id, token_type_ids=parts.token_type_ids
        ).to(parts.device)
        with parts.autocast():
            logits = parts.module(**batch.inputs()).logits.float()
        losses = F.cross_entropy(logits, batch.labels, reduction="none")
        metrics.update(logits, batch.labels, losses.double().sum())
        done += len(rows)
        if time.monotonic() - told > SECONDS_BETWEEN_NEWS:
            told = time.monotonic()
            estimate = min(done * parts.world_size, len(positions))
            parts.post("evaluating", split=split, rows_done=estimate, rows=len(positions))
    scores = metrics.compute()
    assert scores["rows_seen"] == len(positions), f"{split}: {scores['rows_seen']} of {len(positions)} rows counted"
    return scores | {"rows": len(positions)}, metrics.confusion()


def validate_and_save(parts: Parts, progress: Progress) -> None:
    """Validate, note whether it is the best, decide on early stopping, save, and stop if asked to."""
    import ray.train

    config = parts.config.train
    if progress.validated_step != progress.step:
        start = time.monotonic()
        scores, _ = evaluate(parts, "validation")
        score = parallel.broadcast(scores[config.best_metric])
        is_best = is_better(config.best_metric, score, progress.best_score)
        improved = is_better(config.best_metric, score, progress.reference_score, config.early_stopping_min_delta)
        epochs_done = progress.epoch + progress.step_in_epoch / parts.steps_per_epoch
        if is_best or progress.best_step is None:  # a run whose every score is NaN still has a checkpoint to show
            progress.best_score = score if is_best else None
            progress.best_step, progress.best_epoch = progress.step, epochs_done
        if improved:
            progress.reference_score = score
        progress.stale_validations = 0 if improved else progress.stale_validations + 1
        progress.validated_step = progress.step
        patience = config.early_stopping_patience
        progress.stopped_early = patience is not None and progress.stale_validations >= patience
        report = {key: finite_or_none(value) for key, value in scores.items()}
        parts.post(
            "validation",
            epoch=epochs_done,
            step=progress.step,
            scores=report,
            is_best=is_best,
            seconds=time.monotonic() - start,
        )
        save(parts, progress, report)
        ray.train.report(report | {"epoch": epochs_done, "step": progress.step})
        if progress.stopped_early:
            parts.post(
                "stopped_early",
                reason=f"{config.best_metric} has not been better for {patience} validations",
            )
    stop_if_asked(parts)


def stop_if_asked(parts: Parts) -> None:
    """Stop here on every rank if the user asked for it; what there is to save is saved."""
    if parallel.broadcast(parts.rank == 0 and parts.job.board.stop_requested()):
        raise Interrupted


def save(parts: Parts, progress: Progress, scores: dict[str, Any] | None = None) -> None:
    """Save a checkpoint; all ranks take part."""
    start = time.monotonic()
    path = parts.store.save(training_tensors(parts.module, parts.optimizer, parts.scaler), progress, scores)
    parts.post("checkpoint", step=progress.step, path=str(path), seconds=time.monotonic() - start)


def finish(parts: Parts, progress: Progress) -> dict[str, Any]:
    """Load the best weights, test them, and write them as a Hugging Face folder."""
    assert progress.best_step is not None, "every finished run has validated"
    stop_if_asked(parts)
    parts.store.load(progress.best_step, training_tensors(parts.module, None, None))
    result: dict[str, Any] = {
        "status": "finished",
        "step": progress.step,
        "stopped_early": progress.stopped_early,
        "best": {
            "epoch": progress.best_epoch,
            "step": progress.best_step,
            "metric": parts.config.train.best_metric,
            "score": progress.best_score,
        },
    }
    if len(parts.splits["test"]):
        parts.post("phase", text="testing the best checkpoint")
        start = time.monotonic()
        tested, confusion = evaluate(parts, "test")
        scores = {key: finite_or_none(value) for key, value in tested.items()}
        result |= {"test": scores, "confusion": confusion.tolist()}
        seconds = time.monotonic() - start
        parts.post("test", epoch=progress.best_epoch, step=progress.best_step, scores=scores, seconds=seconds)
    if parts.rank == 0:
        parts.post("phase", text="writing the model")
        write_model(parts)
    return result


def write_model(parts: Parts) -> None:
    """Write the model as a Hugging Face folder, under a temporary name first."""
    final = Path(parts.job.run_folder) / "model"
    temporary = final.with_name(".model.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    save_model(parts.module, parts.tokenizer, temporary, max_length=parts.job.max_length)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)


def finite_or_none(value: float) -> float | None:
    """NaN and infinity as None: JSON has no word for them."""
    return value if math.isfinite(value) else None
