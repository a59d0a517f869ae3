"""One thing that was looked at, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "warning", "fault"]


@dataclass(frozen=True)
class Check:
    """A line of the report."""

    name: str
    status: Status
    told: str
    remedy: str = ""
    """What to do about it; empty where there is nothing to do."""
    figures: dict[str, Any] = field(default_factory=dict)
    """The same in numbers, for JSON."""


def counted(number: float, noun: str) -> str:
    """1 GPU, 2 GPUs."""
    return f"{number:g} {noun}{'' if number == 1 else 's'}"
