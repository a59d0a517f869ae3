"""Workers are planned from what there is, and the impossible is refused with a remedy."""

from __future__ import annotations

import importlib.util
import pickle

import pytest

from raytrain_bert.config.errors import ConfigError, ResourceError
from raytrain_bert.config.schema import ScalingSettings
from raytrain_bert.runtime import Node, WorkerPlan, check_dashboard, choose_precision, plan_workers, usable_cpus


@pytest.mark.parametrize(
    ("settings", "nodes", "expected"),
    [
        ({}, [Node(2, 0)], WorkerPlan(2, False, 1)),
        ({}, [Node(1, 0)], WorkerPlan(1, False, 1)),
        ({}, [Node(16, 0)], WorkerPlan(2, False, 8)),
        ({}, [Node(16, 2)], WorkerPlan(2, True, 4)),
        ({}, [Node(4, 4)], WorkerPlan(4, True, 1)),
        ({}, [Node(8, 0), Node(32, 4), Node(32, 4)], WorkerPlan(8, True, 4)),
        ({"use_gpu": False}, [Node(16, 2)], WorkerPlan(2, False, 8)),
        ({"num_workers": 0}, [Node(2, 0)], WorkerPlan(0, False, 2)),
        ({"num_workers": 3}, [Node(8, 0)], WorkerPlan(3, False, 2)),
        ({"num_workers": 2, "use_gpu": True}, [Node(16, 2)], WorkerPlan(2, True, 4)),
        ({"cpus_per_worker": 6}, [Node(16, 2)], WorkerPlan(2, True, 6)),
        ({"num_workers": "1..4"}, [Node(2, 0)], WorkerPlan(4, False, 1, 1)),
        ({"num_workers": "1..2"}, [Node(1, 0), Node(1, 0)], WorkerPlan(2, False, 1, 1)),
        ({"num_workers": "2..8"}, [Node(16, 4)], WorkerPlan(8, True, 2, 2)),
        # An equal share of 8 CPUs is 4, but only one node has 4.
        ({"num_workers": 2}, [Node(3, 0), Node(5, 0)], WorkerPlan(2, False, 3)),
    ],
)
def test_what_is_left_open_is_filled_in(settings: dict[str, object], nodes: list[Node], expected: WorkerPlan) -> None:
    assert plan_workers(ScalingSettings.model_validate(settings), nodes) == expected


@pytest.mark.parametrize(
    ("settings", "nodes", "parts"),
    [
        (
            {"num_workers": "3..4"},
            [Node(2, 0)],
            ["3 workers with 1 CPU each", "There is room for 2", "--scaling.num-workers"],
        ),
        (
            {"num_workers": 2, "use_gpu": True},
            [Node(2, 0)],
            ["2 workers with a GPU each", "0 GPUs", "--no-scaling.use-gpu"],
        ),
        ({"num_workers": 4, "use_gpu": True}, [Node(16, 2)], ["has 2 GPUs", "--scaling.num-workers 2"]),
        ({"num_workers": 0, "use_gpu": True}, [Node(2, 0)], ["0 GPUs"]),
        ({"num_workers": 3}, [Node(2, 0)], ["3 workers", "2 CPUs", "room for 2", "--scaling.num-workers"]),
        (
            {"cpus_per_worker": 2},
            [Node(2, 0)],
            ["2 workers with 2 CPUs each", "room for 1", "--scaling.cpus-per-worker"],
        ),
    ],
)
def test_the_impossible_is_refused_with_what_is_there_and_what_to_change(
    settings: dict[str, object], nodes: list[Node], parts: list[str]
) -> None:
    with pytest.raises(ResourceError) as caught:
        plan_workers(ScalingSettings.model_validate(settings), nodes)
    for part in parts:
        assert part in str(caught.value)


def test_float16_on_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="fp16"):
        choose_precision("fp16", "cpu")


def test_a_dashboard_without_its_packages_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "aiohttp_cors" else find(name))
    check_dashboard(ScalingSettings())
    check_dashboard(ScalingSettings(dashboard=True, address="10.0.0.1:6379"))  # the cluster has its own
    with pytest.raises(ConfigError, match=r"aiohttp_cors.*pip install 'raytrain-bert\[dashboard\]'"):
        check_dashboard(ScalingSettings(dashboard=True))


def test_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(ResourceError("what, where, how")))
    assert (type(error), str(error)) == (ResourceError, "what, where, how")


def test_usable_cpus_is_at_least_one() -> None:
    assert usable_cpus() >= 1
