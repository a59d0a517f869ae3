"""Numbers and lines as people read them."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len

SCORES = {"accuracy": "accuracy", "macro_f1": "macro F1", "weighted_f1": "weighted F1", "mcc": "MCC", "loss": "loss"}
"""The scores that are shown, in order, and what they are called."""
GAP = "  "
BREAKS = re.compile(r" +(?!(?:s|min|h|d|%)\b|% )")
"""Where a line may be broken: not between a number and its unit."""


def duration(seconds: float) -> str:
    """9.2 s, 42 s, 2 min 31 s, 1 h 02 min, 3 d 04 h."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02} h"


def amount(value: float) -> str:
    """Three digits or so: 3.8, 382, 15.2k, 1.52M, 22.7M."""
    if value < 9.95:
        return f"{value:.1f}"
    if value < 9_999.5:
        return f"{value:,.0f}"
    if value < 999_950:
        return f"{value / 1e3:.1f}k"
    return f"{value / 1e6:.1f}M" if value < 999.95e6 else f"{value / 1e9:.1f}B"


def score(value: float | None) -> str:
    """Four decimals; a dash for what could not be computed."""
    return "-" if value is None or math.isnan(value) else f"{value:.4f}"


def epoch_of(epoch: float, num_epochs: int | None) -> str:
    """Epoch 1/3, or epoch 0.50/3 inside one."""
    done = f"{epoch:.0f}" if abs(epoch - round(epoch)) < 0.005 else f"{epoch:.2f}"
    return f"epoch {done}" if num_epochs is None else f"epoch {done}/{num_epochs}"


def rows_of(scores: Mapping[str, Any]) -> str | None:
    """Rows counted of the rows there are: 445/445."""
    seen, rows = scores.get("rows_seen"), scores.get("rows")
    if seen is None and rows is None:
        return None
    return f"{seen if seen is not None else rows:,.0f}/{rows if rows is not None else seen:,.0f}"


def fit(items: Sequence[tuple[str, int]], width: int | None) -> str:
    """Join (text, rank) items; where they do not fit into the width, those of the highest rank go first."""
    left = list(items)
    while width is not None and len(left) > 1 and cell_len(GAP.join(text for text, _ in left)) > width:
        left.remove(max(left, key=lambda item: item[1]))
    return GAP.join(text for text, _ in left)


def wrap(text: str, width: int | None, indent: int = 0) -> str:
    """Break lines between words; a word is never cut, so that paths and commands can be copied.

    Args:
        text: one line or more; spaces before a line are kept.
        width: None leaves the lines as long as they are.
        indent: spaces before each line but the first.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        words = BREAKS.split(line.strip())
        lead = line[: len(line) - len(line.lstrip())]
        current = lead + words[0]
        for word in words[1:]:
            room = math.inf if width is None else width - (indent if lines else 0)
            if cell_len(f"{current} {word}") > room:
                lines.append(current)
                current = lead + word
            else:
                current += f" {word}"
        lines.append(current)
    return ("\n" + " " * indent).join(lines)


def clean(text: str) -> str:
    """The text without control characters: a label or a file name must not steer the terminal."""
    return "".join(
        character if character == "\n" or unicodedata.category(character) not in ("Cc", "Cs") else "?"
        for character in text.replace("\t", " ")
    )
