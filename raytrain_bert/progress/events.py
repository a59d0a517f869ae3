"""Events that the workers post: plain dicts, JSON-able, with the kind under "event"."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Literal, TypedDict

Event = dict[str, Any]
"""Any of the events below, as it travels."""


class Phase(TypedDict):
    """What is being done from now on, for example "loading the model"."""

    event: Literal["phase"]
    text: str


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


class Started(TypedDict):
    """Training begins after this many optimizer steps, 0 for a new run."""

    event: Literal["started"]
    step: int


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
    seconds: float
    """Wall time of one step, a mean over those of the event."""


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
    seconds: float


class Checkpoint(TypedDict):
    """A checkpoint is saved."""

    event: Literal["checkpoint"]
    step: int
    path: str
    seconds: float


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
