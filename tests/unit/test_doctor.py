"""What doctor makes of what it finds."""

from __future__ import annotations

import importlib.metadata
import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from raytrain_bert import doctor
from raytrain_bert.checks import machine, timing
from raytrain_bert.checks.check import Check
from raytrain_bert.checks.cluster import NodeReport, judge, local_paths, storage_mark
from raytrain_bert.config.load import load_config

TOPOLOGY = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV12\tPHB\tSYS\t0-31\t0
GPU1\tNV12\t X \tSYS\tPHB\t0-31\t0
GPU2\tPHB\tSYS\t X \tNV12\t32-63\t1
GPU3\tSYS\tPHB\tNV12\t X \t32-63\t1
NIC0\tPIX\tSYS\tSYS\tSYS

Legend:
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""


def test_links_between_gpus_are_read_from_the_drivers_table() -> None:
    assert machine.links_between(TOPOLOGY) == ["NVLink", "PCIe, the CPU's bridge", "PCIe, between two CPU sockets"]
    assert machine.links_between("") == []


def test_a_driver_with_gpus_that_pytorch_does_not_see_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "nvidia_smi", lambda *words: "550.54, NVIDIA L4\n550.54, NVIDIA L4\n")
    found = machine.gpus()
    assert (found.status, found.figures["driver_has"]) == ("fault", 2)
    assert "PyTorch sees none" in found.told
    monkeypatch.setattr(machine, "nvidia_smi", lambda *words: None)
    assert machine.gpus().status == "ok"


def test_a_package_of_another_version_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.packages().status == "ok"
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.10.0" if name == "ray" else real(name))
    found = machine.packages()
    assert found.status == "fault"
    assert "ray 2.10.0 is not" in found.told


def test_little_shared_memory_and_little_disk_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=64 * 2**20, free=5 * 10**9))
    found = machine.memory()
    assert found.status == "warning"
    assert "--shm-size=" in found.remedy
    assert machine.disk(str(tmp_path / "not" / "there")).status == "warning"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1, free=10**8))
    assert machine.disk(str(tmp_path)).status == "fault"


def test_a_token_that_others_can_read_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert machine.token().status == "ok"
    path = tmp_path / ".ray" / "auth_token"
    path.parent.mkdir()
    path.write_text("f" * 64, encoding="ascii")
    path.chmod(0o644)
    assert (machine.token().status, "chmod 600" in machine.token().remedy) == ("warning", True)
    path.chmod(0o600)
    assert machine.token().status == "ok"
    assert "ffff" not in machine.token().told
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert machine.token().status == "warning"


VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "ray": "2.60.0", "transformers": "5.24.0"}


def node(host: str, seconds: float = 0.0, **more: Any) -> NodeReport:
    return NodeReport(host, seconds, **({"versions": VERSIONS, "missing": (), "problem": ""} | more))


def judged(*reports: NodeReport | str, mark: Path | None = Path("mark")) -> dict[str, Check]:
    return {check.name: check for check in judge(reports, "/runs", mark)}


def test_nodes_that_agree_are_ok() -> None:
    found = judged(node("a"), node("b", 0.01))
    assert {name: check.status for name, check in found.items()} == {"clocks": "ok", "versions": "ok", "storage": "ok"}


def test_every_way_in_which_nodes_differ_is_named_with_the_node() -> None:
    other = node("b", 7.5, versions=VERSIONS | {"torch": "2.9.1"}, missing=("/data/x.csv",), problem="No such file")
    found = judged(node("a"), other, "c")
    assert {name: check.status for name, check in found.items()} == {
        "nodes": "fault",
        "clocks": "warning",
        "versions": "fault",
        "storage": "fault",
        "data": "fault",
    }
    assert "b has torch 2.9.1" in found["versions"].told
    assert "/runs is not shared: b: No such file" in found["storage"].told
    assert found["data"].told == "b does not see /data/x.csv"
    assert all(check.remedy for check in found.values())
    assert judged(node("a"), mark=None)["storage"].status == "fault"


def test_paths_that_nodes_must_see_are_local_files(tmp_path: Path) -> None:
    data = {"data.train": ["/a.csv", "s3://b/c", "/d/*.csv"], "data.test": ["hf:x"]}
    assert local_paths(load_config(data | {"model.name": "bert-base-uncased"})) == ["/a.csv"]
    mark = storage_mark(tmp_path / "runs")
    assert mark is not None
    assert mark.read_text(encoding="utf-8") == mark.name
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert storage_mark(tmp_path / "file" / "runs") is None


def test_the_whole_run_is_estimated_from_a_few_steps() -> None:
    steps = [{"seconds": 9.0, "rows": 8, "tokens": 80}] * 3 + [{"seconds": 0.5, "rows": 8, "tokens": 100}] * 7
    state = {"rows": {"train": 801}, "seconds": {"start-up": 10.0, "validation": 4.0, "test": 3.0}, "memory": None}
    config = load_config({"data.train": ["x.csv"], "train.global_batch_size": "8", "train.num_epochs": "2"})
    found = timing.judge(config, steps, state, 2)
    assert found.figures["rows_per_second"] == 16
    assert found.figures["seconds_of_the_whole_run"] == round(10 + 202 * 0.5 + 2 * 2.0 + 3)
    assert "202 steps" in found.told


def test_the_largest_micro_batch_fills_what_weights_and_optimizer_leave() -> None:
    memory = {"peak_bytes": 6 * 10**9, "fixed_bytes": 2 * 10**9, "total_bytes": 20 * 10**9, "tokens": 4096}
    assert timing.largest_micro_batch(memory) == 4096 * 4  # 18 - 2 GB are free for what took 4 GB
    assert timing.largest_micro_batch({"peak_bytes": 1, "fixed_bytes": 0, "tokens": 5}) is None


def test_the_report_has_a_line_and_what_to_do_and_the_exit_code_tells_of_faults() -> None:
    checks = [
        Check("a", "ok", "fine"),
        Check("b", "warning", "so so", "mend it"),
        Check("c", "fault", "broken", "do it"),
    ]

    def told(some: list[Check], *, as_json: bool = False) -> tuple[int, str]:
        stream = io.StringIO()
        return doctor.report(some, Console(file=stream, width=80), as_json=as_json), stream.getvalue()

    code, text = told(checks)
    assert code == 2
    assert text.splitlines()[:5] == [
        "ok       a          fine",
        "warning  b          so so",
        "                    -> mend it",
        "fault    c          broken",
        "                    -> do it",
    ]
    assert text.splitlines()[-1] == "1 fault, 1 warning"
    assert told(checks[:2])[0] == 0
    code, text = told(checks, as_json=True)
    document = json.loads(text)
    assert (code, document["faults"], document["checks"][1]["remedy"]) == (2, 1, "mend it")
