"""A page as headless Chromium has it after its scripts have run."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=3000",
]

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian's package chromium)")


def page_in_browser(path: Path, *, width: int = 1300) -> str:
    """The page's elements, as HTML, once its scripts have run."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory() as profile:
        words = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", f"--window-size={width},1000", "--dump-dom"]
        done = subprocess.run([*words, path.as_uri()], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout
