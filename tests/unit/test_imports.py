"""Imports point down only, and importing does nothing."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "raytrain_bert"
LAYERS = [
    {"config", "scores", "__init__"},
    {"runtime", "data", "batching", "model", "parallel", "optim", "metrics", "checkpoint", "progress", "run_folder",
     "model_card", "faults", "pulse", "gauges"},
    {"job", "receipt", "trackers"},
    {"parts"},
    {"step", "soup"},
    {"step_log"},
    {"command", "loop", "inference", "watch"},
    {"worker"},
    {"driver"},
    {"run"},
    {"sweep", "checks"},
    {"train", "tune", "predict", "doctor"},
    {"drill_report"},
    {"drill", "submit"},
    {"cli"},
    {"__main__"},
]  # fmt: skip
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}
MODULES = sorted(path.relative_to(PACKAGE.parent).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py"))


def part_of(module: str) -> str:
    """raytrain_bert/data/read or raytrain_bert.data.read -> data."""
    pieces = module.replace("/", ".").split(".")
    return pieces[1] if len(pieces) > 1 else "__init__"


def imported_parts(path: Path) -> set[str]:
    """Parts of the package that a module imports anywhere in its code."""
    package = path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", ".").rpartition(".")[0]
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = (
                importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                if node.level
                else node.module
            )
            names |= {f"{base}.{alias.name}" for alias in node.names} if base == "raytrain_bert" else {str(base)}
    found = {part_of(name) for name in names if name.split(".")[0] == "raytrain_bert"}
    return {name if name in LAYER_OF else "__init__" for name in found}


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down_only(module: str) -> None:
    here = part_of(module)
    for other in imported_parts(PACKAGE.parent / f"{module}.py") - {here}:
        assert LAYER_OF[other] < LAYER_OF[here], f"{module} ({here}) imports {other}"


LIGHT = [
    "train",
    "tune",
    "run",
    "cli",
    "predict",
    "job",
    "worker",
    "driver",
    "command",
    "config.load",
    "progress.screen",
    "watch",
    "faults",
    "pulse",
    "drill",
    "submit",
    "doctor",
]


@pytest.mark.parametrize("module", LIGHT)
def test_what_help_imports_needs_neither_ray_nor_torch(module: str) -> None:
    code = (
        f"import sys, raytrain_bert.{module}; print({{'ray', 'torch', 'transformers', 'datasets'}} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
