"""What the user names as data, expanded to files: paths, folders, globs, URIs, data sets."""

from __future__ import annotations

import difflib
import functools
import os
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.fs as pafs

from raytrain_bert.config import bundled
from raytrain_bert.config.errors import DataError

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
FAMILIES = {
    "delimited": {".csv", ".tsv", ".tab"},
    "json": {".jsonl", ".ndjson", ".json"},
    "parquet": {".parquet", ".pq"},
}
STRUCTURED = {suffix for family in FAMILIES.values() for suffix in family}
FAMILY_OF_FORMAT = {"csv": "delimited", "tsv": "delimited", "jsonl": "json", "json": "json", "parquet": "parquet"}
PLAIN = {"", ".txt", ".text", ".data", ".all"}
NOT_DATA = {"readme", "license", "licence", "copying", "notice", "citation", "changelog", "authors", "makefile"}
NOT_DATA_FILES = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "requirements.txt"}
HELD_OUT = {"test", "dev", "val", "valid", "validation", "eval"}
SPLIT_WORD = re.compile(r"(?:^|[._-])(train|training|test|dev|val|valid|validation|eval)(?=$|[._-])", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """Files of one split, in the order they are read."""

    kind: Literal["table", "folders", "saved", "hub"]
    """Tables of rows; a text per file in a folder per class; a saved Hugging Face data set; one of its hub."""
    files: tuple[str, ...]
    """Absolute paths or URIs; for a hub data set its name."""
    labels: tuple[str, ...] | None = None
    """Label of each file, for a folder per class."""


def find_source(paths: Sequence[str], format: str = "auto") -> Source:
    """Expand what the user named.

    Raises:
        DataError: something is missing, or the parts do not belong together.
    """
    parts = [_expand(path, format) for path in paths]
    kinds = {part.kind for part in parts}
    if len(kinds) > 1 or (len(parts) > 1 and kinds & {"saved", "hub"}):
        raise DataError(f"{', '.join(paths)}: files, folders per class and Hugging Face data sets cannot be mixed.")
    files = [file for part in parts for file in part.files]
    labels = [label for part in parts for label in part.labels or ()]
    if twice := sorted({file for file in files if files.count(file) > 1}) if len(parts) > 1 else []:
        raise DataError(f"{twice[0]}: named more than once in {', '.join(paths)}.")
    return Source(parts[0].kind, tuple(files), tuple(labels) or None)


def read_bytes(path: str, size: int | None = None) -> bytes:
    """Content of a file, unpacked if its name ends in .gz, .bz2 or .zst; at most `size` bytes of it.

    Raises:
        DataError: the file is not there, or is not what its name says.
    """
    file_system, inner, _ = locate(path)
    compression = COMPRESSIONS.get(os.path.splitext(inner)[1].lower())
    try:
        with file_system.open_input_stream(inner, compression=compression) as stream:
            data: bytes = stream.read() if size is None else stream.read(size)
            return data
    except FileNotFoundError:
        raise DataError(
            f"{shown(path)}: not found on machine {socket.gethostname()}. Every machine of the cluster must see "
            "the file: put it on shared storage or give an s3:// or gs:// address."
        ) from None
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{shown(path)}: cannot be read: {error}") from None


def locate(path: str) -> tuple[pafs.FileSystem, str, str]:
    """File system of a path or URI, the path in it, and the path that the URI's authority stands for."""
    if "://" not in path:
        return pafs.LocalFileSystem(), path, ""
    scheme, authority, inner, query = _split_uri(path)
    if scheme == "file":
        return pafs.LocalFileSystem(), "/" + unquote(inner), ""
    try:
        file_system, base = _remote(f"{scheme}://{authority}/{query}")
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{shown(path)}: cannot be opened: {error}") from None
    return file_system, f"{base}/{inner}".rstrip("/"), base


@functools.lru_cache(maxsize=32)
def _remote(uri: str) -> tuple[pafs.FileSystem, str]:
    # Cached: making one may ask the network for the bucket's region.
    file_system, base = pafs.FileSystem.from_uri(quote(uri, safe=":/?&=@%+,~"))
    return file_system, base.rstrip("/")


def _split_uri(uri: str) -> tuple[str, str, str, str]:
    """Scheme, authority, path without its first slash, and the query with its question mark."""
    scheme, _, rest = uri.partition("://")
    rest, mark, query = rest.partition("?")
    authority, _, inner = rest.partition("/")
    return scheme, authority, inner, mark + query


def _to_path(inner: str, base: str, original: str) -> str:
    """Path in a file system -> path or URI, with the credentials and the query of the original."""
    if "://" not in original or original.startswith("file://"):
        return inner
    scheme, authority, _, query = _split_uri(original)
    return f"{scheme}://{authority}/{_relative(inner, base)}{query}"


def shown(path: str) -> str:
    """A path for the screen, without the credentials a URI may carry."""
    return re.sub(r"(://)[^/@:]*:[^/@]*@", r"\1", path).partition("?")[0] if "://" in path else path


def _expand(path: str, format: str) -> Source:
    if path.startswith(bundled.PREFIX):
        return _folder(str(bundled.find_bundled(path)), "folder")
    if path.startswith("hf:"):
        return Source("hub", (path.removeprefix("hf:"),))
    name = path
    if "://" not in path:
        path = os.path.abspath(os.path.expanduser(path))
    file_system, inner, base = locate(path)
    kind = _file_info(file_system, inner, path).type
    if kind == pafs.FileType.File:
        if format in ("folder", "hf"):
            raise DataError(f"{shown(path)}: is a file; --data.format {format} needs a folder.")
        return Source("table", (_to_path(inner, base, path),))
    if kind == pafs.FileType.Directory:
        return _folder(path, format)
    if any(c in inner for c in "*?["):
        return _glob(path)
    if format == "hf":
        return Source("hub", (name,))
    raise DataError(f"{shown(path)}: not found.{_near(file_system, inner)}")


def _file_info(file_system: pafs.FileSystem, inner: str, path: str) -> Any:
    try:
        return file_system.get_file_info([inner])[0]
    except OSError as error:
        raise DataError(f"{shown(path)}: cannot be reached: {error}") from None


def _list(file_system: pafs.FileSystem, folder: str, path: str, recursive: bool = True) -> list[Any]:
    """Files and folders under a folder, hidden ones left out, sorted by path."""
    selector = pafs.FileSelector(folder, recursive=recursive, allow_not_found=True)
    try:
        found = file_system.get_file_info(selector)
    except OSError as error:
        raise DataError(f"{shown(path)}: cannot be listed: {error}") from None
    visible = [
        info
        for info in found
        if not any(part.startswith((".", "_")) for part in _relative(info.path, folder).split("/"))
    ]
    return sorted(visible, key=lambda info: info.path)


def _relative(path: str, folder: str) -> str:
    return path[len(folder.rstrip("/")) :].lstrip("/")


def suffix_of(path: str) -> str:
    """Lower-case extension, that of the content for packed files; empty for names such as 51060."""
    stem, suffix = os.path.splitext(shown(path).lower())
    return os.path.splitext(stem)[1] if suffix in COMPRESSIONS else suffix


def _is_data(path: str) -> bool:
    name = path.rpartition("/")[2].lower()
    return name not in NOT_DATA_FILES and name.partition(".")[0] not in NOT_DATA


def _folder(path: str, format: str) -> Source:
    file_system, inner, base = locate(path)
    listed = _list(file_system, inner, path)
    names = {_relative(info.path, inner) for info in listed}
    if "dataset_dict.json" in names or {"dataset_info.json", "state.json"} <= names:
        return Source("saved", (_to_path(inner, base, path),))
    files = [info.path for info in listed if info.type == pafs.FileType.File and _is_data(info.path)]
    structured = [file for file in files if suffix_of(file) in STRUCTURED]
    plain = [file for file in files if suffix_of(file) in PLAIN]
    in_folders = [file for file in plain if "/" in _relative(file, inner)]
    classes = sorted({_relative(file, inner).partition("/")[0] for file in in_folders})
    if format == "folder" or (format == "auto" and not structured and len(classes) > 1):
        if format == "folder":
            in_folders = [file for file in files if "/" in _relative(file, inner)]
            classes = sorted({_relative(file, inner).partition("/")[0] for file in in_folders})
        if not classes:
            raise DataError(f"{shown(path)}: no folder with text files in it; expected one folder for each class.")
        if _mixes_splits(classes) and all(SPLIT_WORD.fullmatch(name) for name in classes):
            raise DataError(_splits_message(path, classes))
        labels = tuple(_relative(file, inner).partition("/")[0] for file in in_folders)
        return Source("folders", tuple(_to_path(file, base, path) for file in in_folders), labels)
    families = [name for name, family in FAMILIES.items() if any(suffix_of(file) in family for file in structured)]
    if format in FAMILY_OF_FORMAT:
        structured = [file for file in structured if suffix_of(file) in FAMILIES[FAMILY_OF_FORMAT[format]]]
    elif len(families) > 1:
        raise DataError(
            f"{shown(path)}: holds files of several kinds ({', '.join(families)}). Name the files, or set "
            "--data.format."
        )
    tables = structured or plain
    if not tables:
        expected = ", ".join(sorted(STRUCTURED | {".txt"}))
        raise DataError(f"{shown(path)}: the folder holds no data files ({expected}), and no folder per class.")
    relative = [_relative(file, inner) for file in tables]
    if _mixes_splits(relative):
        raise DataError(_splits_message(path, relative))
    return Source("table", tuple(_to_path(file, base, path) for file in tables))


def _mixes_splits(names: Iterable[str]) -> bool:
    """Whether some names say train and others test: read together, the test rows would be trained on."""
    words = {match.lower() for name in names for part in name.split("/") for match in SPLIT_WORD.findall(part)}
    return bool(words & HELD_OUT) and bool(words - HELD_OUT)


def _splits_message(path: str, names: Sequence[str]) -> str:
    marked = [name for name in names if any(SPLIT_WORD.search(part) for part in name.split("/"))]
    return (
        f"{shown(path)}: holds several splits ({', '.join(marked[:4])}). "
        "Name each on its own with --data.train, --data.validation and --data.test."
    )


def _glob(path: str) -> Source:
    file_system, inner, base = locate(path)
    fixed = inner[: min(inner.index(c) for c in "*?[" if c in inner)].rpartition("/")[0]
    pattern = re.compile(_glob_regex(inner))
    recursive = "/" in inner[len(fixed) + 1 :]
    hits = [
        info.path
        for info in _list(file_system, fixed or "/", path, recursive)
        if info.type == pafs.FileType.File and pattern.fullmatch(info.path)
    ]
    if not hits:
        raise DataError(f"{shown(path)}: no file matches.{_near(file_system, inner)}")
    return Source("table", tuple(_to_path(hit, base, path) for hit in hits))


def _glob_regex(pattern: str) -> str:
    """Shell pattern -> regular expression; * and ? stay in one folder, ** does not."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]/]+\])", pattern)
    special = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(
        special.get(part)
        or (
            "[" + part[1:-1].replace("\\", r"\\").replace("!", "^", part[1] == "!") + "]"
            if part[:1] == "["
            else re.escape(part)
        )
        for part in parts
    )


def _near(file_system: pafs.FileSystem, inner: str) -> str:
    """What is there instead, as a sentence."""
    folder, name = os.path.split(inner.rstrip("/"))
    while folder not in ("", "/") and file_system.get_file_info([folder])[0].type != pafs.FileType.Directory:
        folder, name = os.path.split(folder)
    if folder in ("", "/"):
        return ""
    names = [info.base_name for info in _list(file_system, folder, folder, recursive=False)]
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return f" Did you mean {' or '.join(f'{folder}/{match}' for match in close)}?"
    if not names:
        return f" {folder} is empty."
    return f" {folder} holds {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}."
