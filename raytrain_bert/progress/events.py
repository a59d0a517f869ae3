"""Events that the workers post: plain dicts, JSON-able, with the kind under "event"."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Literal, NotRequired, TypedDict

Event = dict[str, Any]
"""Any of the events below, as it travels."""


class Phase(TypedDict):
    """What is being done from now on, for example "loading the model"."""

    event: Literal["phase"]
    text: str
    is_start: NotRequired[bool]
    """Whether workers are beginning: the first ones, or those that take over."""


class Ready(TypedDict):
    """The workers are up, with what they found."""

    event: Literal["ready"]
    device: str
    world_size: int
    threads: int
    precision: str
    parameters: int
    trainable_parameters: int
    tokens_per_micro_batch: int
    steps_per_epoch: int
    total_steps: int
    global_batch_size: int
    effective: NotRequired[dict[str, Any]]
    """Settings by dotted key, as the optimizer and the model have them."""
    workers: NotRequired[list[dict[str, Any]]]
    """rank, host, pid and Ray's node of each worker."""


class Started(TypedDict):
    """Training begins after this many optimizer steps, 0 for a new run."""

    event: Literal["started"]
    step: int
    world_size: NotRequired[int]
    world_size_before: NotRequired[int]
    """Number of workers that wrote the checkpoint."""


class Lost(TypedDict):
    """Workers are gone; others take over."""

    event: Literal["lost"]
    reasons: dict[str, str]
    """By rank."""


class TakenAway(TypedDict):
    """Ray announces that nodes of these ranks will be taken away; a checkpoint is saved."""

    event: Literal["taken_away"]
    ranks: list[int]
    deadline_ms: int | None
    """Unix time in milliseconds."""


class Skipped(TypedDict):
    """A step was left out: its gradient was not finite."""

    event: Literal["skipped"]
    step: int
    loss: float
    skipped: int
    """Steps left out so far."""
    rows: str


class Epoch(TypedDict):
    """The receipt of an epoch, or of the part of it that was trained."""

    event: Literal["epoch"]
    epoch: int
    """From 0."""
    step: int
    rows: int
    rows_seen: int
    repeated: int
    rows_per_rank: list[int] | None
    is_whole: bool


class StepRecord(TypedDict):
    """One optimizer step; counts are sums over all ranks."""

    epoch: int
    """Epoch under way, from 0."""
    step: int
    """Optimizer steps done, this one included."""
    loss: float
    grad_norm: float
    learning_rate: float
    rows: int
    tokens: int
    """Real tokens."""
    padded_tokens: int
    """Tokens with padding included."""
    skipped: NotRequired[bool]
    """Left out, because the gradient was not finite."""
    seconds: float
    """Wall time of one step, a mean over those of the event."""
    straggler_gap: NotRequired[float]
    """Longest less shortest computing time of a worker in a step, in seconds, a mean over those of the event."""


class Steps(TypedDict):
    """The optimizer steps since the last such event."""

    event: Literal["steps"]
    records: list[StepRecord]
    total_steps: int
    seconds: float
    """Wall time of these steps alone, without validation and checkpoints."""


class Evaluating(TypedDict):
    """How far the evaluation of a split is."""

    event: Literal["evaluating"]
    split: str
    rows_done: int
    rows: int


class Validation(TypedDict):
    """A validation is over."""

    event: Literal["validation"]
    epoch: float
    """Epochs done."""
    step: int
    scores: dict[str, float | None]
    """accuracy, macro_f1, weighted_f1, mcc, loss, rows_seen, rows."""
    is_best: bool
    best: NotRequired[dict[str, float | None]]
    """epoch, step and score of the best validation so far."""
    seconds: float


class Checkpoint(TypedDict):
    """A checkpoint is saved."""

    event: Literal["checkpoint"]
    step: int
    path: str
    seconds: float
    """Time that the training steps waited."""
    write_seconds: NotRequired[float]
    """Time until it was complete on disk."""


class StoppedEarly(TypedDict):
    """Training ends before its last step."""

    event: Literal["stopped_early"]
    reason: str


class Tested(TypedDict):
    """The best checkpoint is tested; scores as in Validation."""

    event: Literal["test"]
    scores: dict[str, float | None]
    seconds: float


class Message(TypedDict):
    """Something to tell the user."""

    event: Literal["note", "warning"]
    text: str


def plain(value: Any) -> Any:
    """The value in Python's own types: numpy and torch scalars as numbers, arrays and tuples as lists, paths as text.

    Raises:
        TypeError: for a value that has no such form.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, float):  # np.float64 is one too
        return float(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    if hasattr(value, "tolist"):  # arrays, tensors and scalars of numpy and torch, without importing either
        return plain(value.tolist())
    raise TypeError(f"{type(value).__name__} cannot be part of an event")


def to_json_line(event: Mapping[str, Any]) -> str:
    """The event as one line of strict JSON, without the line end: NaN and infinities are null."""
    return json.dumps(_without_nan(plain(event)), allow_nan=False, ensure_ascii=False)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return value
