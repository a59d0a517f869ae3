"""From files and flags to one validated Config: defaults < experiment YAML < dotted flags.

The flags are made from the schema with argparse and stay strings until pydantic sees them together with the
YAML, so that every problem is told at once (argparse alone stops at the first).
"""

from __future__ import annotations

import argparse
import difflib
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from typing_extensions import TypeVar

from .errors import ConfigError
from .schema import Config

DEFAULT_EXPERIMENT = "bbc_news.yaml"
JOB_FOLDERS = "/runtime_resources/working_dir_files/"
"""In the path of the folders that Ray unpacks a job's --working-dir to."""

Root = TypeVar("Root", bound=Config, default=Config)


def settings_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every setting under a schema as (dotted key, field)."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from settings_of(field.annotation, f"{key}.")
        elif prefix:  # a section that holds no settings, as the search space of a sweep, has no flags of its own
            yield key, field


def flag_of(key: str) -> str:
    """The command line's spelling: optim.learning_rate -> --optim.learning-rate."""
    return "--" + key.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser, root: type[Config] = Config) -> None:
    """Add one dotted flag per setting; values stay strings, a flag that is not given leaves no trace."""
    groups: dict[str, Any] = {}
    for key, field in settings_of(root):
        section = key.partition(".")[0]
        if section not in groups:
            groups[section] = parser.add_argument_group(section, root.model_fields[section].description)
        kinds = _plain_types(field.annotation)
        options: dict[str, Any] = {
            "dest": key,
            "default": argparse.SUPPRESS,
            "metavar": _metavar(field, kinds),
            "help": _help(field),
        }
        if list in kinds:
            options["action"] = "append"
        if bool in kinds:
            options |= {"nargs": "?", "const": "true"}
            groups[section].add_argument(
                "--no-" + key.replace("_", "-"),
                dest=key,
                action="store_const",
                const="false",
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )
        groups[section].add_argument(flag_of(key), **options)


def load_config(
    flags: Mapping[str, Any],
    config_path: str | Path | None = None,
    unknown_flags: Sequence[str] = (),
    root: type[Root] = Config,  # type: ignore[assignment]
) -> Root:
    """Merge defaults, one YAML file and dotted flags into a Config.

    Args:
        flags: dotted key -> string, or list of strings.
        config_path: experiment YAML; without one, and without training data in the flags, the bundled
            experiment is the base.
        unknown_flags: words of the command line that no flag took; they are reported with the rest.
        root: the schema; a sweep's has sections of its own.

    Raises:
        ConfigError: with every problem found.
    """
    if config_path is None and "data.train" not in flags:
        config_path = default_experiment()
    # The stray words behind an unknown flag are its values, and no problem of their own.
    strays = [word for word in unknown_flags if word.startswith("-")] or list(unknown_flags)
    problems = [_unknown_flag(word, root) for word in strays]
    tree = read_yaml(Path(config_path), root) if config_path is not None else {}
    tree = _known_sections(tree, problems, str(config_path), root)
    named_none = {key for key, field in settings_of(root) if "none" in _plain_types(field.annotation)}
    for key, value in flags.items():
        section, _, name = key.partition(".")
        unset = value in ("none", ["none"]) and key not in named_none
        tree.setdefault(section, {})[name] = None if unset else value
    try:
        config = root.model_validate(tree)
    except ValidationError as error:
        problems += [readable(detail, root) for detail in error.errors()]
        raise ConfigError.from_problems(problems) from None
    if problems:
        raise ConfigError.from_problems(problems)
    return config


def default_experiment() -> Path:
    """The experiment of a run without any flag: BBC News with MiniLM."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "experiments", package.parent / "experiments"):
        if (folder / DEFAULT_EXPERIMENT).is_file():
            return folder / DEFAULT_EXPERIMENT
    raise ConfigError("The bundled experiment is not installed. Name your data with --data.train.")


def read_yaml(path: Path, root: type[Config] = Config) -> dict[str, Any]:
    """Read an experiment file; keys may be written with - or _."""
    tree = read_mapping(path, f"sections ({', '.join(root.model_fields)})")
    return {str(key).replace("-", "_"): _underscored(value) for key, value in tree.items()}


def read_mapping(path: Path, expected: str = "a mapping") -> dict[str, Any]:
    """Read a YAML file that holds a mapping; an empty one is an empty mapping.

    Raises:
        ConfigError: it cannot be read, or holds something else than is `expected`.
    """
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        nearby = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], n=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(str(path.parent / name) for name in nearby)}?" if nearby else ""
        raise ConfigError(f"{path}: no such configuration file.{hint}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected {expected}, found {type(tree).__name__}.")
    return tree


def with_absolute_paths(config: Root) -> Root:
    """The configuration with local paths that hold in any folder, so that a run can be resumed from anywhere.

    A Ray job works in a copy of its folder that Ray removes: there, what is written goes to the home folder.
    """

    def absolute(path: str, base: str = "") -> str:
        named = "://" in path or path.startswith(("bundled:", "hf:"))
        return path if named else os.path.abspath(os.path.join(base, os.path.expanduser(path)))

    kept = str(Path.home()) if is_removed_later(os.getcwd()) else ""
    config = with_input_paths(config, absolute)
    output = config.output.model_copy(update={"storage_path": absolute(config.output.storage_path, kept)})
    update: dict[str, Any] = {"output": output}
    if config.data.cache_dir is not None:
        update["data"] = config.data.model_copy(update={"cache_dir": absolute(config.data.cache_dir, kept)})
    return config.model_copy(update=update)


def with_input_paths(config: Root, change: Callable[[str], str]) -> Root:
    """The configuration with the paths of its data, and of a model that is a folder, changed."""
    data: dict[str, Any] = {
        name: [change(path) for path in paths]
        for name in ("train", "validation", "test")
        if (paths := getattr(config.data, name)) is not None
    }
    sections: dict[str, Any] = {"data": config.data.model_copy(update=data)}
    is_folder = Path(config.model.name).expanduser().is_dir() or JOB_FOLDERS in config.model.name
    if is_folder:
        sections["model"] = config.model.model_copy(update={"name": change(config.model.name)})
    return config.model_copy(update=sections)


def load_begun(
    path: Path, root: type[Root], flags: Mapping[str, Any] | None = None, unknown_flags: Sequence[str] = ()
) -> Root:
    """The configuration of a run that has begun, from its folder.

    Where it was begun by a Ray job, what came along with that job is looked for in the folder of this one.
    """

    def here(path: str) -> str:
        _, mark, rest = path.partition(JOB_FOLDERS)
        return os.path.join(os.getcwd(), rest.partition("/")[2]) if mark else path

    config = load_config(flags or {}, path, unknown_flags, root)
    return with_input_paths(config, here) if is_removed_later(os.getcwd()) else config


def is_removed_later(folder: str) -> bool:
    """Whether Ray made this folder for a job, and removes it some time after it."""
    return JOB_FOLDERS in Path(folder).as_posix()


def dump_yaml(config: Config) -> str:
    """The resolved configuration as YAML that load_config takes."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _underscored(value: Any) -> Any:
    return {str(k).replace("-", "_"): v for k, v in value.items()} if isinstance(value, dict) else value


def _known_sections(
    tree: dict[str, Any], problems: list[str], source: str, root: type[Config]
) -> dict[str, dict[str, Any]]:
    """Drop what is no section, and say so."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in tree.items():
        if name not in root.model_fields:
            problems.append(f"{source}: {unknown(name, list(root.model_fields), 'section')}")
        elif value is not None and not isinstance(value, dict):
            problems.append(f"{source}: {name} must hold settings, not {value!r}")
        else:
            sections[name] = dict(value or {})
    return sections


def _plain_types(annotation: Any) -> set[Any]:
    """The types an annotation allows, None and wrappers taken off."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _plain_types(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return {kind for part in typing.get_args(annotation) for kind in _plain_types(part)} - {type(None)}
    if origin is typing.Literal:
        return set(typing.get_args(annotation))
    return {origin or annotation}


def _metavar(field: FieldInfo, kinds: set[Any]) -> str:
    if isinstance(field.json_schema_extra, dict) and "metavar" in field.json_schema_extra:
        return str(field.json_schema_extra["metavar"])
    names = {str: "TEXT", int: "N", float: "X", bool: "true|false", list: "TEXT"}
    literals = [kind for kind in kinds if isinstance(kind, str)]
    return "|".join(sorted(literals)) if literals else names[next(iter(kinds))]


def _help(field: FieldInfo) -> str:
    default = field.default
    shown = f" (default: {', '.join(map(str, default)) if isinstance(default, list) else default})"
    return ((field.description or "") + ("" if default is None else shown)).replace("%", "%%")


def readable(detail: Any, root: type[Config] = Config) -> str:
    """One pydantic problem as one sentence."""
    location = [str(part) for part in detail["loc"]]
    key = ".".join(part for part in location if not part.isdigit())
    if detail["type"] == "extra_forbidden":
        return unknown(key, [name for name, _ in settings_of(root)], "setting")
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "value_error":
        return f"{key}: {message}"
    return f"{key}: {message[0].lower()}{message[1:]}, not {detail['input']!r}"


def unknown(name: str, known: Sequence[str], noun: str) -> str:
    """Name what is unknown and the nearest thing that is known."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if not near:  # the right name in the wrong section, or no section at all
        near = [key for key in known if key.rpartition(".")[2] == name.rpartition(".")[2]][:1]
    hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}" if noun == "section" else ""
    return f"{name}: unknown {noun}{hint}"


def _unknown_flag(word: str, root: type[Config]) -> str:
    if not word.startswith("-"):
        return f"{word!r}: not understood; settings are given as --section.key value"
    flag = word.partition("=")[0]
    known = [flag_of(key) for key, _ in settings_of(root)]
    bare = {known_flag.rpartition(".")[2]: known_flag for known_flag in known}
    near = difflib.get_close_matches(flag, known, n=1, cutoff=0.6) or [
        bare[name] for name in difflib.get_close_matches(flag.lstrip("-"), list(bare), n=1, cutoff=0.6)
    ]
    return f"{flag}: unknown flag" + (f"; did you mean {near[0]}?" if near else "; see --help")
