"""Figures that Prometheus gets, and the Grafana dashboard that draws them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from raytrain_bert.gauges import GAUGES, SCORE_TAGS, Gauges, in_ascii, readings
from raytrain_bert.trackers import Guarded

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "raytrain_bert.json"
RECORDS = [
    {"step": 1, "rows": 3, "loss": 1.0, "tokens": 30, "padded_tokens": 40, "learning_rate": 1e-3, "grad_norm": 2.0}
    | {"seconds": 0.5, "straggler_gap": 0.1},
    {"step": 2, "rows": 1, "loss": 3.0, "tokens": 10, "padded_tokens": 10, "learning_rate": 2e-3, "grad_norm": 4.0}
    | {"seconds": 0.25, "straggler_gap": 0.2},
]


def test_figures_of_steps_are_means_over_rows_and_tokens() -> None:
    found = {name: value for name, value, _ in readings({"event": "steps", "records": RECORDS, "seconds": 2.0})}
    assert found == {
        "step": 2,
        "loss": pytest.approx((3 * 1.0 + 1 * 3.0) / 4),
        "learning_rate": 2e-3,
        "grad_norm": 4.0,
        "rows_per_second": 2.0,
        "padding_fraction": pytest.approx(1 - 40 / 50),
        "step_seconds": 0.25,
        "straggler_gap_seconds": 0.2,
    }


def test_what_is_no_number_sets_nothing() -> None:
    event = {"event": "validation", "epoch": 1.0, "best": {"score": None}}
    event |= {"scores": {"loss": float("nan"), "accuracy": 0.5, "rows": 9, "macro_f1": None}}
    assert readings(event) == [("epoch", 1.0, {}), ("validation_score", 0.5, {"metric": "accuracy"})]


def test_the_dashboard_draws_every_metric_and_no_other() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert sorted(re.match(r"ray_(\w+)\{", query)[1] for query in queries) == sorted(GAUGES)  # type: ignore[index]
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    for query in queries:
        filters = dict(re.findall(r'(\w+)=~"\$(\w+)"', query))
        assert set(filters) <= {*SCORE_TAGS, "SessionName"}
        assert set(filters.values()) <= variables
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(queries)


def test_names_in_any_script_are_tags(local_ray: None) -> None:
    assert in_ascii("größe 日本") == r"gr\xf6\xdfe \u65e5\u672c"
    gauges = Gauges("größe", "日本")
    gauges.take({"event": "steps", "records": RECORDS, "seconds": 2.0})
    gauges.take({"event": "validation", "epoch": 1.0, "scores": {"accuracy": 0.5}})


def test_a_metric_that_fails_ends_its_own_figures_and_not_the_run() -> None:
    class Broken:
        def take(self, event: Any) -> None:
            raise UnicodeEncodeError("ascii", "ö", 0, 1, "ordinal not in range")

        def close(self, scores: Any) -> None:
            raise AssertionError("told to nobody any more")

    told: list[str] = []
    guarded = Guarded("Ray's metrics", Broken, told.append)
    guarded.take({"event": "steps"})
    guarded.take({"event": "steps"})
    guarded.close({})
    assert len(told) == 1
    assert "Ray's metrics: no more figures of this run, after UnicodeEncodeError" in told[0]
