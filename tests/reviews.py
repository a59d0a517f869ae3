"""Labelled text out of the tiny tokenizer's words, with labels that can be learnt from it."""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from pathlib import Path

SIGNS = {
    "bad": ["bad", "awful", "poor", "sad", "hate"],
    "good": ["good", "great", "fine", "happy", "love"],
    "sport": ["team", "game", "match", "goal"],
}
FILLER_TEXT = "the a of and to in is it was film book food place price bank phone chip music data law"
FILLER = FILLER_TEXT.split()
LABELS = tuple(sorted(SIGNS))


def review(label: str, rng: random.Random) -> str:
    """Filler with signs of the label in it, and what a CSV file has to quote."""
    words = rng.choices(FILLER, k=rng.randint(4, 20)) + rng.choices(SIGNS[label], k=rng.randint(3, 6))
    rng.shuffle(words)
    return ", ".join([" ".join(words[:3]), " ".join(words[3:])]) + rng.choice([".", "!", ' "and"', "\nThe end."])


def reviews(count: int, seed: int) -> list[dict[str, str]]:
    """Rows of text and label, all different."""
    rng = random.Random(seed)
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < count:
        label = rng.choice(LABELS)
        row = {"text": review(label, rng), "label": label}
        rows[row["text"]] = row
    return list(rows.values())


def pairs(count: int, seed: int) -> list[dict[str, str]]:
    """Rows of two sentences, of which the second one tells the label."""
    rng = random.Random(seed)
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < count:
        label = rng.choice(LABELS)
        row = {"sentence1": review(rng.choice(LABELS), rng), "sentence2": review(label, rng), "label": label}
        rows[row["sentence1"] + row["sentence2"]] = row
    return list(rows.values())


def write_csv(path: Path, rows: Sequence[dict[str, str]]) -> Path:
    """A CSV file with a header."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path
