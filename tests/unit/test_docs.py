"""What the pages say is what the program does."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from raytrain_bert.cli import VERBS
from raytrain_bert.config.load import flag_of, settings_of
from raytrain_bert.config.sweep import SweepConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND_FLAGS = {"--config", "--resume", "--overwrite", "--print-config", "--quiet", "--verbose", "--help", "--text",
                 "--text-pair", "--version", "--steps", "--faults"}  # fmt: skip


def test_settings_page_is_current() -> None:
    spec = importlib.util.spec_from_file_location("settings_page", ROOT / "docs" / "settings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == module.settings_page()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_on_the_pages_exists(page: Path) -> None:
    known = {flag_of(key) for key, _ in settings_of(SweepConfig)} | COMMAND_FLAGS
    known |= {"--no-" + flag_of(key)[2:] for key, _ in settings_of(SweepConfig)}
    text = page.read_text(encoding="utf-8")
    flags = set(re.findall(r"(?<![\w-])--(?:no-)?[a-z]+\.[a-z0-9-]+", text))
    assert {flag for flag in flags if not flag.startswith("--search.")} <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_linked_file_exists(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_every_verb_is_a_module_with_a_main() -> None:
    for verb in VERBS:
        assert "def main(" in (ROOT / "raytrain_bert" / f"{verb}.py").read_text(encoding="utf-8")


def test_make_targets_run_the_readme_commands() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for command in ('pip install -c constraints.txt -e ".[dev]"', "python -m raytrain_bert.train", "python -m pytest"):
        assert command in makefile
        assert command in readme
