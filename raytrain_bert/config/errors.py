"""Errors that the user can fix: what is wrong, where, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence


class UserError(Exception):
    """Something that the user can put right; shown as one message, without a traceback (exit code 2).

    The whole message is the only argument, so that the error survives pickling across Ray.
    """

    title = "error"


class ConfigError(UserError):
    """The configuration is wrong; holds every problem that was found, not only the first."""

    title = "configuration error"

    @classmethod
    def from_problems(cls, problems: Sequence[str]) -> ConfigError:
        """Join problems into one error, one line each."""
        if len(problems) == 1:
            return cls(problems[0])
        return cls(f"{len(problems)} problems:\n" + "\n".join(f"  - {problem}" for problem in problems))


class DataError(UserError):
    """The data cannot be used as it is."""

    title = "data error"


class ResourceError(UserError):
    """The machine or the cluster does not have what was asked for."""

    title = "resource error"


class ModelError(UserError):
    """The model or tokenizer cannot be loaded or used as asked."""

    title = "model error"


class RunFolderError(UserError):
    """The run folder is used, missing or damaged."""

    title = "run folder error"


class TrainingError(UserError):
    """Training went wrong in a way that its settings or data decide."""

    title = "training error"
