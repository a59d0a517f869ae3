"""A trained classifier, ready to use: texts in, labels and probabilities out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raytrain_bert.config.errors import RunFolderError
from raytrain_bert.model.build import load_model

TOKENS_PER_BATCH = 8192


@dataclass(frozen=True)
class Prediction:
    """The most probable label of one text."""

    label: str
    probability: float
    """Softmax probability of `label`."""


class Classifier:
    """A model folder (or the run folder around it) with its tokenizer, native or pooled head alike."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer
        self.names = [model.config.id2label[index] for index in range(model.config.num_labels)]

    @classmethod
    def load(cls, folder: str | Path, *, trust_remote_code: bool = False) -> Classifier:
        """Load RUN or RUN/model; on the first GPU where there is one.

        Raises:
            RunFolderError: there is no model.
        """
        from transformers import AutoTokenizer

        path = Path(folder).expanduser().resolve()
        path = path / "model" if (path / "model" / "config.json").is_file() else path
        if not (path / "config.json").is_file():
            raise RunFolderError(f"{path} holds no model: give a finished run's folder or a Hugging Face model folder.")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = load_model(path, trust_remote_code=trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        return cls(model.to(device), tokenizer)

    @torch.no_grad()
    def logits(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> NDArray[np.float32]:
        """Scores before softmax: (rows,) texts -> (rows, classes); long texts are cut as in training."""
        encoded = self.tokenizer(list(texts), list(pairs) if pairs is not None else None, truncation=True)
        lengths = np.array([len(ids) for ids in encoded["input_ids"]], dtype=np.int64)
        scores = np.zeros((len(lengths), len(self.names)), dtype=np.float32)
        for rows in _batches_by_length(lengths):
            batch = self.tokenizer.pad(
                {key: [values[row] for row in rows] for key, values in encoded.items()}, return_tensors="pt"
            ).to(self.model.device)
            scores[rows] = self.model(**batch).logits.float().cpu().numpy()
        return scores

    def predict(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[Prediction]:
        """The most probable label of each text (or pair of texts)."""
        probabilities = torch.softmax(torch.from_numpy(self.logits(texts, pairs)), dim=-1)
        best = probabilities.max(dim=-1)
        return [
            Prediction(self.names[index], probability)
            for index, probability in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]


def _batches_by_length(lengths: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Rows sorted by length, cut so that a padded batch stays under TOKENS_PER_BATCH."""
    order = np.argsort(lengths, kind="stable")
    start = 0
    for stop in range(1, len(order) + 1):
        full = stop == len(order) or (stop + 1 - start) * lengths[order[stop]] > TOKENS_PER_BATCH
        if full:
            yield order[start:stop]
            start = stop
