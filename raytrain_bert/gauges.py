"""Figures of a run as metrics of the Ray cluster, which Prometheus scrapes and Grafana draws."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TAGS = ("sweep", "run")

# Name, what it tells, unit. Prometheus has them with the prefix ray_.
GAUGES = {
    "raytrain_bert_step": "Optimizer steps done.",
    "raytrain_bert_epoch": "Epochs done.",
    "raytrain_bert_loss": "Training loss of the last steps, a mean over rows.",
    "raytrain_bert_learning_rate": "Learning rate of the last step.",
    "raytrain_bert_grad_norm": "L2 norm of the gradient in the last step, before clipping.",
    "raytrain_bert_rows_per_second": "Training rows a second over the last steps, all workers.",
    "raytrain_bert_padding_fraction": "Share of padding among the tokens of the last steps.",
    "raytrain_bert_step_seconds": "Wall time of an optimizer step in seconds.",
    "raytrain_bert_straggler_gap_seconds": "Longest less shortest computing time of a worker in a step, in seconds.",
    "raytrain_bert_validation_score": "Score of the last validation; tag metric.",
    "raytrain_bert_best_score": "The chosen metric at the best validation so far.",
    "raytrain_bert_checkpoint_stall_seconds": "Time that the steps waited for the last checkpoint, in seconds.",
}
SCORE_TAGS = (*TAGS, "metric")


class Gauges:
    """Sets the metrics from a run's events, in the process of its driver."""

    def __init__(self, run: str, sweep: str = "") -> None:
        """
        Args:
            run: name of the run, or number and sampled values of a trial.
            sweep: name of the sweep; empty for a run of its own.
        """
        from ray.util.metrics import Gauge

        self._gauges: dict[str, Any] = {}
        for name, meaning in GAUGES.items():
            tags = SCORE_TAGS if name == "raytrain_bert_validation_score" else TAGS
            gauge = Gauge(name, description=meaning, tag_keys=tags)
            gauge.set_default_tags({"run": in_ascii(run), "sweep": in_ascii(sweep)})
            self._gauges[name] = gauge

    def take(self, event: Mapping[str, Any]) -> None:
        """Set what an event tells."""
        for name, value, tags in readings(event):
            self._gauges[f"raytrain_bert_{name}"].set(value, tags=tags)

    def close(self, scores: Mapping[str, float]) -> None:
        """Nothing: the last values stay until the process ends."""


def in_ascii(tag: str) -> str:
    """A tag as Ray takes it, in ASCII only; different ones stay different."""
    return tag.encode("ascii", "backslashreplace").decode("ascii")


def readings(event: Mapping[str, Any]) -> list[tuple[str, float, dict[str, str]]]:
    """Metric, value and further tags that an event tells; nothing for what is no number."""
    kind = event["event"]
    found: list[tuple[str, Any, dict[str, str]]] = []
    if kind == "steps" and event["records"]:
        records = event["records"]
        last = records[-1]
        rows = sum(record["rows"] for record in records)
        padded = sum(record["padded_tokens"] for record in records)
        tokens = sum(record["tokens"] for record in records)
        seconds = event["seconds"]
        losses = [(record["loss"], record["rows"]) for record in records]
        found = [
            ("step", last["step"], {}),
            ("loss", sum(loss * count for loss, count in losses) / rows if rows else None, {}),
            ("learning_rate", last["learning_rate"], {}),
            ("grad_norm", last["grad_norm"], {}),
            ("rows_per_second", rows / seconds if seconds else None, {}),
            ("padding_fraction", 1 - tokens / padded if padded else None, {}),
            ("step_seconds", last["seconds"], {}),
            ("straggler_gap_seconds", last.get("straggler_gap"), {}),
        ]
    elif kind == "validation":
        found = [("epoch", event["epoch"], {})]
        found += [
            ("validation_score", value, {"metric": name})
            for name, value in event["scores"].items()
            if name not in ("rows", "rows_seen")
        ]
        if "best" in event:
            found.append(("best_score", event["best"]["score"], {}))
    elif kind == "checkpoint":
        found = [("checkpoint_stall_seconds", event["seconds"], {})]
    return [(name, float(value), tags) for name, value, tags in found if value is not None and value == value]
