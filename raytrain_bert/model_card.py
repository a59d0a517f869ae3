"""The model card: README.md of a model folder, from what is known of its run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from raytrain_bert import __version__
from raytrain_bert.config.schema import Config

SCORES = {"accuracy": "accuracy", "macro_f1": "macro F1", "weighted_f1": "weighted F1", "mcc": "MCC", "loss": "loss"}


def model_card(
    config: Config, label_names: Sequence[str], num_rows: Mapping[str, int], max_length: int, result: Mapping[str, Any]
) -> str:
    """Markdown with the front matter that the Hugging Face hub reads.

    Args:
        config: the run's configuration.
        label_names: classes in the order of their ids.
        num_rows: rows by split.
        max_length: longest input in tokens.
        result: what the worker loop gave back.
    """
    header: dict[str, Any] = {"pipeline_tag": "text-classification", "library_name": "transformers"}
    if not config.model.name.startswith(("bundled:", "/", ".")):
        header["base_model"] = config.model.name
    best, epochs = result["best"], result.get("epochs", config.train.num_epochs)
    best_score = "none" if best["score"] is None else f"{best['score']:.4f}"
    chosen = f"Best of the validations by {SCORES[best['metric']]}: {best_score} after {best['epoch']:.4g} epochs."
    if result.get("trained_on_validation"):
        chosen = "Trained on the validation rows too: there is no validation score."
    lines = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---",
        "",
        "# Text classifier",
        "",
        f"Trained with raytrain_bert {__version__} from `{config.model.name}`, {_head(config)}.",
        chosen,
        "",
        "## Labels",
        "",
        *[f"{index}. `{name}`" for index, name in enumerate(label_names)],
        "",
        "## Scores",
        "",
        *_score_table(result.get("test")),
        "",
        "## Training",
        "",
        f"- rows: {', '.join(f'{name} {count:,}' for name, count in num_rows.items())}",
        f"- longest input: {max_length} tokens; longer texts are cut",
        f"- {epochs:.4g} epoch{'' if epochs == 1 else 's'}, {config.train.global_batch_size} rows a step, "
        f"learning rate {config.optim.learning_rate:g} ({config.optim.schedule}), seed {config.train.seed}",
        "",
        "## Use",
        "",
        "```python",
        "from transformers import pipeline",
        "",
        f'classify = pipeline("text-classification", model="path/of/this/folder"{_remote(config)})',
        'classify("...", truncation=True)',
        "```",
        "",
    ]
    return "\n".join(lines)


def _head(config: Config) -> str:
    if config.model.pooling == "native":
        return "with the architecture's own classification head"
    return f"with one linear layer over the encoder's output ({config.model.pooling} pooling)"


def _remote(config: Config) -> str:
    """A pooled head is code of its own, which lies in the folder."""
    return "" if config.model.pooling == "native" else ", trust_remote_code=True"


def _score_table(test: Mapping[str, Any] | None) -> list[str]:
    if test is None:
        return ["There was no test data."]
    rows = [f"| {name} | {'-' if test[key] is None else f'{test[key]:.4f}'} |" for key, name in SCORES.items()]
    return [f"On {test['rows']:,} test rows:", "", "| metric | value |", "|---|---|", *rows]
