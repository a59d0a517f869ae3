"""The training loop of one worker: every rank runs it alike."""

from __future__ import annotations

import math
import os
import resource
import shutil
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from raytrain_bert import parallel
from raytrain_bert.batching import plan
from raytrain_bert.batching.collate import collate
from raytrain_bert.checkpoint import Progress, training_tensors
from raytrain_bert.config.errors import RunFolderError, TrainingError
from raytrain_bert.faults import fault_of
from raytrain_bert.job import Job
from raytrain_bert.metrics import EvaluationMetrics
from raytrain_bert.model.build import save_model
from raytrain_bert.parts import Parts, build_parts, device_of, load_rows
from raytrain_bert.pulse import COMPUTING, EXCHANGING, PREPARING
from raytrain_bert.scores import is_better
from raytrain_bert.soup import greedy_soup
from raytrain_bert.step import StepResult, out_of_memory, share_of, train_step, weight_of
from raytrain_bert.step_log import StepLog

LOG_EVERY_STEPS = {"cpu": 1, "cuda": 10}
EVALUATION_BUDGET = 2  # without activations to keep, twice the tokens fit
SECONDS_BETWEEN_NEWS = 0.5
SECONDS_BETWEEN_QUESTIONS = 5.0
"""Asking Ray whether a node will be taken away is a barrier over all workers."""
SECONDS_BETWEEN_REPORTS = 5.0
MOST_SKIPPED_IN_A_ROW = 25
SAME_SCORE = 1e-5
"""Of a checkpoint and the score it was chosen for, which another number of workers may have computed."""
RECEIPT_TENSOR = "receipt.times_seen"


class Interrupted(Exception):
    """The user asked for a stop; a checkpoint of this moment is saved."""


@dataclass
class Clocks:
    """What this worker has to remember of the time; only rank 0's counts."""

    saved: float = field(default_factory=time.monotonic)
    """When the last checkpoint was saved."""
    asked: float = field(default_factory=time.monotonic)
    """When Ray was last asked about preemptions."""
    reported: float = -math.inf
    """When scores were last reported to Ray."""
    preempted: Any = None
    """The preemption that a checkpoint has been saved for."""


def train(job: Job) -> dict[str, Any]:
    """Train, choose the best, test it and write it; every rank gets the same result."""
    rank, _ = parallel.rank_and_world_size()
    parts: Parts | None = None
    progress = Progress()
    try:
        if rank == 0:
            job.board.post([{"event": "phase", "text": "loading the model", "is_start": True}])
        if not (Path(job.run_folder) / "run.json").is_file():
            raise RunFolderError(
                f"{socket.gethostname()} does not see the run folder {job.run_folder}. "
                "All nodes need the same folder: set --output.storage-path to a shared one."
            )
        parts = build_parts(job, device_of(job), *load_rows(job.files))
        parts.pulse.start()
        if job.purpose == "soup":
            result = cook(parts)
        else:
            progress = restore(parts)
            result = run_to_the_end(parts, progress)
        parts.store.close()
        return result
    except Exception as error:
        minutes = job.config.scaling.timeout_minutes
        raise fault_of(error, rank=rank, step=progress.step, timeout_minutes=minutes) from error
    finally:
        if parts is not None:
            parts.pulse.stop()
        job.board.flush()


def run_to_the_end(parts: Parts, progress: Progress) -> dict[str, Any]:
    """Train the epochs that are left, then finish; or stop where the user asked for it."""
    clocks = Clocks()
    try:
        while parts.job.purpose != "finish" and not is_over(parts, progress):
            train_epoch(parts, progress, clocks)
            validate_and_save(parts, progress, clocks)
        return finish(parts, progress)
    except Interrupted:
        await_checkpoint(parts)
        return {"status": "interrupted", "step": progress.step}


def is_over(parts: Parts, progress: Progress) -> bool:
    """Whether there is nothing left to train."""
    trained = progress.epoch >= parts.config.train.num_epochs or progress.step >= parts.last_step
    return progress.stopped_early or (trained and progress.validated_step == progress.step)


def restore(parts: Parts) -> Progress:
    """Go on from the newest checkpoint of the run folder that is intact, if there is one."""
    store = parts.store
    step = None
    if parts.rank == 0:
        store.remove_leftovers()
        step = store.newest_intact(lambda text: parts.post("warning", text=text))
    step = parallel.broadcast(step)
    if step is None:
        parts.post("started", step=0, world_size=parts.world_size)
        return Progress()
    progress = store.read_progress(step)
    tensors = training_tensors(parts.module, parts.optimizer, parts.scaler)
    times_seen = torch.zeros(len(parts.splits["train"]), dtype=torch.uint8)
    store.load(step, tensors | {RECEIPT_TENSOR: times_seen})
    parts.receipt.restore(times_seen, progress.rows_per_rank if progress.world_size == parts.world_size else None)
    set_schedule_step(parts.schedule, step)
    parts.post("started", step=step, world_size=parts.world_size, world_size_before=progress.world_size)
    forget_lost_best(parts, progress)
    return progress


def forget_lost_best(parts: Parts, progress: Progress) -> None:
    """Where the best checkpoint is gone or damaged, choose the best among those to come."""
    best = progress.best_step
    if best is None or best == progress.step:
        return
    damage = None
    if parts.rank == 0:
        damage = parts.store.damage(best) if best in parts.store.steps() else "it is not there"
    damage = parallel.broadcast(damage)
    if damage is not None:
        parts.post("warning", text=f"the best checkpoint, of step {best:,}, is lost ({damage}); a new best is chosen")
        progress.best_step = progress.best_epoch = progress.best_score = progress.validated_step = None


def set_schedule_step(schedule: torch.optim.lr_scheduler.LambdaLR, step: int) -> None:
    """Put the learning rates where they are after `step` optimizer steps."""
    schedule.last_epoch = step
    for group, base, scale in zip(schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = base * scale(step)
    schedule._last_lr = [group["lr"] for group in schedule.optimizer.param_groups]


def train_epoch(parts: Parts, progress: Progress, clocks: Clocks) -> None:
    """Train the steps that the epoch under way has left; ends with `progress.epoch` one up."""
    if progress.step >= parts.last_step:
        return
    config = parts.config
    lengths = parts.rows.lengths[parts.splits["train"]]
    batches = plan.global_batches(
        lengths, global_batch_size=config.train.global_batch_size, seed=config.train.seed, epoch=progress.epoch
    )
    log = StepLog(
        parts.job.board,
        parts.rank,
        parts.device,
        every=config.train.log_every_steps or LOG_EVERY_STEPS[parts.device.type],
        total_steps=parts.last_step,
        world_size=parts.world_size,
    )
    parts.module.train()
    for batch in batches[progress.step_in_epoch :]:
        take_step(parts, progress, log, batch, lengths)
        last = progress.step_in_epoch == len(batches) or progress.step == parts.last_step
        validation_is_due = is_due(config.train.validate_every_steps, progress.step)
        save_is_due = is_due(config.checkpoint.every_steps, progress.step)
        if not (log.is_due() or last or validation_is_due or save_is_due):
            continue
        parts.pulse.set(progress.step, EXCHANGING)
        records, wishes = log.flush(wishes_of(parts, clocks))
        stop, out_of_time, ask_ray, save_failed = wishes
        refuse_non_finite(parts, progress, records, batches)
        tell_skipped(parts, progress, records, batches)
        if save_failed:
            await_checkpoint(parts)
            raise RuntimeError("another worker could not save its part of a checkpoint")
        tell_saved(parts)
        if last:
            break  # the caller validates, saves and looks for a stop
        taken_away = ask_ray and will_be_taken_away(parts, clocks)
        if validation_is_due:
            validate_and_save(parts, progress, clocks)
            parts.module.train()
            if progress.stopped_early:
                close_receipt(parts, progress, is_whole=False)
                return
        elif save_is_due or out_of_time or taken_away or stop:
            save(parts, progress, clocks)
        else:
            continue
        if taken_away:
            await_checkpoint(parts)
        if stop:
            raise Interrupted
        log.restart_clock()
    is_whole = progress.step_in_epoch == len(batches)
    close_receipt(parts, progress, is_whole=is_whole)
    if is_whole:
        progress.epoch += 1
        progress.step_in_epoch = 0


def take_step(
    parts: Parts, progress: Progress, log: StepLog, batch: NDArray[np.int64], lengths: NDArray[np.integer]
) -> StepResult:
    """One optimizer step over a global batch, noted in log and receipt."""
    parts.pulse.set(progress.step + 1, PREPARING)
    learning_rate = parts.config.optim.learning_rate * parts.schedule.lr_lambdas[0](progress.step)
    share = share_of(parts, batch, lengths)
    try:
        result = train_step(parts, share, weight_of(parts, batch), progress.step)
    except torch.OutOfMemoryError as error:  # outside of a micro batch: the optimizer's own state
        raise out_of_memory(parts, share.micro_batches[0]) from error
    except Exception as error:
        rows = share.rows if share.counted else batch[:1]
        minutes = parts.config.scaling.timeout_minutes
        detail = named_rows(parts, rows)
        raise fault_of(error, rank=parts.rank, step=progress.step, detail=detail, timeout_minutes=minutes) from error
    parts.receipt.add(share.rows)
    parts.largest_micro_batch = max([parts.largest_micro_batch, *(b.num_padded_tokens for b in share.micro_batches)])
    progress.step += 1
    progress.step_in_epoch += 1
    if result.skipped:
        progress.skipped_steps += 1
    progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if result.skipped else 0
    log.add(progress.epoch, progress.step, result, learning_rate, share.micro_batches if share.counted else [])
    return result


def wishes_of(parts: Parts, clocks: Clocks) -> list[bool]:
    """What this rank would have all do now: stop, save as it is time, ask Ray about preemptions, end a failed save."""
    if parts.rank:
        return [False, False, False, parts.store.has_failed()]
    now, every = time.monotonic(), parts.config.checkpoint.every_minutes
    return [
        parts.job.board.stop_requested(),
        every is not None and now - clocks.saved > 60 * every,
        now - clocks.asked > SECONDS_BETWEEN_QUESTIONS,
        parts.store.has_failed(),
    ]


def will_be_taken_away(parts: Parts, clocks: Clocks) -> bool:
    """Whether Ray announces, for the first time, that a node of this run will be taken away."""
    import ray.train

    clocks.asked = time.monotonic()
    notice = ray.train.get_preemption_info()
    if notice is None or (clocks.preempted is not None and notice.preempted_ranks == clocks.preempted):
        return False
    clocks.preempted = notice.preempted_ranks
    parts.post("taken_away", ranks=list(notice.preempted_ranks), deadline_ms=notice.deadline_ms)
    return True


def named_rows(parts: Parts, rows: NDArray[np.int64]) -> str:
    """Training rows (by position), as a person finds them: file and row."""
    positions = parts.splits["train"][rows]
    if parts.origins is None:
        return f"rows {', '.join(map(str, positions.tolist()))}"
    return f"rows of the batch: {parts.origins.told(positions)}"


def batch_of(progress: Progress, record: dict[str, Any], batches: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The global batch of a step of the epoch under way."""
    first_step = progress.step - progress.step_in_epoch
    return batches[int(record["step"]) - first_step - 1]


def refuse_non_finite(
    parts: Parts, progress: Progress, records: list[dict[str, Any]], batches: list[NDArray[np.int64]]
) -> None:
    """End the run, on all ranks alike, at the first step whose loss or gradient is not finite, if that is the policy.

    Raises:
        TrainingError: names step and rows.
    """
    for record in records:
        # A scaler meets infinite gradients as a matter of course, and leaves those steps out.
        norm_counts = not parts.scaler.is_enabled()
        finite = math.isfinite(record["loss"]) and (math.isfinite(record["grad_norm"]) or not norm_counts)
        if finite or record.get("skipped"):
            continue
        last = parts.store.latest()
        raise TrainingError(
            f"Step {record['step']:,}: the loss is {record['loss']:g} and the gradient norm {record['grad_norm']:g} "
            f"({named_rows(parts, batch_of(progress, record, batches))}). Lower --optim.learning-rate, set "
            "--train.precision fp32, or leave such steps out with --train.non-finite skip."
            + ("" if last is None else f" The checkpoint of step {last:,} is from before.")
        )


def tell_skipped(
    parts: Parts, progress: Progress, records: list[dict[str, Any]], batches: list[NDArray[np.int64]]
) -> None:
    """Tell of steps that were left out; too many in a row end the run.

    Raises:
        TrainingError: nothing but skipped steps.
    """
    for record in records:
        if record.get("skipped"):
            rows = named_rows(parts, batch_of(progress, record, batches))
            parts.post("skipped", step=record["step"], loss=record["loss"], skipped=progress.skipped_steps, rows=rows)
    if progress.skipped_in_a_row >= MOST_SKIPPED_IN_A_ROW:
        raise TrainingError(
            f"{progress.skipped_in_a_row} steps in a row, up to step {progress.step:,}, had no finite gradient and "
            "were left out: the model has diverged. Lower --optim.learning-rate or set --train.precision fp32."
        )


def close_receipt(parts: Parts, progress: Progress, *, is_whole: bool) -> None:
    """Check that every row was seen once, and tell."""
    receipt = parts.receipt.close(progress.epoch, is_whole=is_whole)
    parts.post("epoch", epoch=progress.epoch, step=progress.step, **receipt.fields())


def is_due(every: int | None, step: int) -> bool:
    """Whether something that happens every so many steps happens after this one."""
    return every is not None and step % every == 0


@torch.no_grad()
def evaluate(parts: Parts, split: str, step: int = 0) -> tuple[dict[str, Any], Tensor]:
    """Scores over every row of a split, each counted once over all ranks, and the confusion matrix.

    The same on every rank; the matrix is (classes, classes), true labels down, predicted ones across.
    """
    parts.module.eval()
    metrics = EvaluationMetrics(len(parts.job.label_names), parts.device)
    positions = parts.splits[split]
    lengths = parts.rows.lengths[positions]
    share = plan.evaluation_share(lengths, rank=parts.rank, world_size=parts.world_size)
    done, told = 0, time.monotonic()
    parts.pulse.set(step, COMPUTING)
    for rows in plan.micro_batches(share, lengths, EVALUATION_BUDGET * parts.tokens_per_micro_batch):
        batch = collate(
            parts.rows, positions[rows], pad_token_id=parts.pad_token_id, token_type_ids=parts.token_type_ids
        ).to(parts.device)
        try:
            with parts.autocast():
                logits = parts.module(**batch.inputs()).logits.float()
        except torch.OutOfMemoryError as error:
            raise out_of_memory(parts, batch) from error
        losses = F.cross_entropy(logits, batch.labels, reduction="none")
        metrics.update(logits, batch.labels, losses.double().sum())
        done += len(rows)
        if time.monotonic() - told > SECONDS_BETWEEN_NEWS:
            told = time.monotonic()
            estimate = min(done * parts.world_size, len(positions))
            parts.post("evaluating", split=split, rows_done=estimate, rows=len(positions))
    parts.pulse.set(step, EXCHANGING)
    scores = metrics.compute()
    assert scores["rows_seen"] == len(positions), f"{split}: {scores['rows_seen']} of {len(positions)} rows counted"
    return scores | {"rows": len(positions)}, metrics.confusion()


def validate_and_save(parts: Parts, progress: Progress, clocks: Clocks) -> None:
    """Validate, note whether it is the best, decide on early stopping, save, and stop if asked to."""
    import ray.train

    config = parts.config.train
    if progress.validated_step != progress.step:
        start = time.monotonic()
        scores, _ = evaluate(parts, "validation", progress.step)
        score = parallel.broadcast(scores[config.best_metric])
        # What was trained on cannot choose between epochs: the last one counts.
        is_best = parts.job.on_validation_too or is_better(config.best_metric, score, progress.best_score)
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
            best={"epoch": progress.best_epoch, "step": progress.best_step, "score": progress.best_score},
            seconds=time.monotonic() - start,
        )
        save(parts, progress, clocks, report)
        # A report is a barrier that Ray's controller lets through every two seconds or so.
        if parallel.broadcast(time.monotonic() - clocks.reported > SECONDS_BETWEEN_REPORTS):
            clocks.reported = time.monotonic()
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


def save(parts: Parts, progress: Progress, clocks: Clocks, scores: dict[str, Any] | None = None) -> None:
    """Save a checkpoint; all ranks take part."""
    start = time.monotonic()
    times_seen, progress.rows_per_rank = parts.receipt.over_all_ranks()
    progress.world_size = parts.world_size
    # What has been told of the steps must not be lost with this worker once their checkpoint counts.
    if parts.rank == 0:
        parts.job.board.flush()
    tensors = training_tensors(parts.module, parts.optimizer, parts.scaler) | {RECEIPT_TENSOR: times_seen}
    await_checkpoint(parts)
    parts.store.save(tensors, progress, scores, started=start)
    clocks.saved = time.monotonic()
    tell_saved(parts)


def tell_saved(parts: Parts) -> None:
    """Tell of the checkpoint that has become complete, if one has."""
    saved = parts.store.finished()
    if saved is not None:
        parts.post(
            "checkpoint",
            step=saved.step,
            path=str(saved.path),
            seconds=saved.stall_seconds,
            write_seconds=saved.write_seconds,
        )


def await_checkpoint(parts: Parts) -> None:
    """Wait for the checkpoint that is being written, and tell of it."""
    parts.store.wait()
    tell_saved(parts)


def finish(parts: Parts, progress: Progress) -> dict[str, Any]:
    """Load the best weights, test them, and write them as a Hugging Face folder."""
    assert progress.best_step is not None, "every finished run has validated"
    stop_if_asked(parts)
    await_checkpoint(parts)
    parts.store.load(progress.best_step, training_tensors(parts.module, None, None))
    result: dict[str, Any] = {
        "status": "finished",
        "step": progress.step,
        "epochs": progress.epoch + progress.step_in_epoch / parts.steps_per_epoch,
        "trained_on_validation": parts.job.on_validation_too,
        "memory": memory_of(parts),
        "stopped_early": progress.stopped_early,
        "skipped_steps": progress.skipped_steps,
        "best": {
            "epoch": progress.best_epoch,
            "step": progress.best_step,
            "metric": parts.config.train.best_metric,
            "score": progress.best_score,
        },
    }
    if parts.job.purpose == "trial":
        return result | {"status": "trained"}
    if parts.job.purpose == "finish":
        check_best(parts, progress)
    return result | test_and_write(parts, progress)


def memory_of(parts: Parts) -> dict[str, int]:
    """Most memory that this worker has held, in bytes, and what of it does not grow with the micro batches."""
    weights = list(parts.module.parameters())
    # Of what is trained: the gradient, and AdamW's two moments.
    fixed = sum(p.numel() * p.element_size() * (4 if p.requires_grad else 1) for p in weights)
    found = {"fixed_bytes": fixed, "tokens": parts.largest_micro_batch}
    if parts.device.type == "cuda":
        total = torch.cuda.get_device_properties(parts.device).total_memory
        return found | {"peak_bytes": torch.cuda.max_memory_allocated(parts.device), "total_bytes": total}
    return found | {"peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


def test_and_write(parts: Parts, progress: Progress) -> dict[str, Any]:
    """Test the model as it is, where there are test rows, and write it."""
    result: dict[str, Any] = {}
    if len(parts.splits["test"]):
        parts.post("phase", text="testing the best checkpoint")
        start = time.monotonic()
        tested, confusion = evaluate(parts, "test", progress.step)
        scores = {key: finite_or_none(value) for key, value in tested.items()}
        result = {"test": scores, "confusion": confusion.tolist()}
        seconds = time.monotonic() - start
        parts.post("test", epoch=progress.best_epoch, step=progress.best_step, scores=scores, seconds=seconds)
    if parts.rank == 0:
        parts.post("phase", text="writing the model")
        write_model(parts)
    return result


def cook(parts: Parts) -> dict[str, Any]:
    """Average the weights of the ingredients; where that is better than the first alone, test and write it."""
    metric = parts.config.train.best_metric
    parts.post("phase", text="averaging weights")

    def score() -> float:
        return parallel.broadcast(float(evaluate(parts, "validation")[0][metric]))

    soup = greedy_soup(parts, score)
    won = is_better(metric, soup["score"], soup["alone"])
    best = {"epoch": 0.0, "step": 0, "metric": metric, "score": soup["score"]}
    result = {"status": "finished", "step": 0, "stopped_early": False, "skipped_steps": 0, "best": best, "soup": soup}
    return result | {"won": won} | (test_and_write(parts, Progress(best_epoch=0.0, best_step=0)) if won else {})


def check_best(parts: Parts, progress: Progress) -> None:
    """Validate the best checkpoint once more: it must have the score that it was chosen for.

    Raises:
        TrainingError: it has another one.
    """
    metric = parts.config.train.best_metric
    parts.post("phase", text="validating the best checkpoint")
    scores, _ = evaluate(parts, "validation", progress.step)
    if progress.best_score is not None and not math.isclose(
        scores[metric], progress.best_score, rel_tol=SAME_SCORE, abs_tol=SAME_SCORE
    ):
        raise TrainingError(
            f"The checkpoint of step {progress.best_step:,} was chosen for {metric} {progress.best_score:.6g} and has "
            f"{scores[metric]:.6g}."
        )


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
