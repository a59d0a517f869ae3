"""Keep the noise of Ray and other libraries off the screen: it goes to a log file, whoever writes it."""

from __future__ import annotations

import fcntl
import io
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

COPY_BYTES = 1 << 16


class Streams:
    """The original standard streams, and the log that stands in for them."""

    def __init__(self, stdout: TextIO, stderr: TextIO, log_path: Path | None) -> None:
        """Use captured_streams to make one."""
        self.stdout = stdout
        """Writes to where the program's standard output went before."""
        self.stderr = stderr
        """Writes to where the program's standard error went before."""
        self.log_path = log_path
        """The file that standard output and error go to now; None where they are not captured."""

    def redirect_to(self, path: Path) -> None:
        """Send everything to another file from now on, with what the log holds so far; the old file is removed.

        Raises:
            OSError: when the file cannot be written; the old log then stays in use.
        """
        if self.log_path is None or (path.exists() and path.samefile(self.log_path)):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        _flush_standard_streams()
        new = _open_log(path)
        try:
            with self.log_path.open("rb") as old:
                _copy(old, new)
                os.dup2(new, 1)
                os.dup2(new, 2)
                _copy(old, new)  # what other threads wrote meanwhile
        finally:
            os.close(new)
        with suppress(OSError):
            self.log_path.unlink()
        self.log_path = path


@contextmanager
def captured_streams(log_path: Path | None) -> Iterator[Streams]:
    """Send standard output and error, of Python and of native code, to a log file (appended) while inside.

    Args:
        log_path: None captures nothing; the streams given are then the program's own.
    """
    if log_path is None:
        with ExitStack() as stack:
            yield Streams(_or_nowhere(sys.stdout, stack), _or_nowhere(sys.stderr, stack), None)
        return
    with ExitStack() as stack:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log = _open_log(log_path)
        stack.callback(os.close, log)
        _flush_standard_streams()
        stdout = _keep(sys.stdout, 1, stack)
        stderr = _keep(sys.stderr, 2, stack)
        for number, name in ((1, "stdout"), (2, "stderr")):
            _redirect(number, log, stack)
            stream = getattr(sys, name)
            if not _writes_to(stream, number):
                stack.callback(setattr, sys, name, stream)
                # On the descriptor, not on the file: whoever keeps this object can still write after the end.
                setattr(sys, name, open(number, "w", buffering=1, errors="replace", closefd=False))  # noqa: SIM115
            elif isinstance(stream, io.TextIOWrapper):
                # A library that prints more than the locale can write does not fail.
                stack.callback(stream.reconfigure, errors=stream.errors)
                stream.reconfigure(errors="backslashreplace")
        stack.callback(_flush_standard_streams)
        yield Streams(stdout, stderr, log_path)


def _open_log(path: Path) -> int:
    """Open for appending; never as descriptor 0, 1 or 2, which may be free where a stream is closed."""
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        return fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(opened)


def _keep(stream: TextIO | None, number: int, stack: ExitStack) -> TextIO:
    """A stream to where this one writes now, that the redirection leaves alone."""
    if stream is None or not _writes_to(stream, number):
        return _or_nowhere(stream, stack)
    kept = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
    copy = open(kept, "w", encoding=stream.encoding, errors="replace")  # noqa: SIM115 (the stack closes it)
    stack.callback(_close, copy)
    return copy


def _or_nowhere(stream: TextIO | None, stack: ExitStack) -> TextIO:
    """The stream, or one that drops everything where there is none."""
    return stack.enter_context(open(os.devnull, "w", encoding="utf-8")) if stream is None else stream


def _redirect(number: int, log: int, stack: ExitStack) -> None:
    """Let a descriptor write to the log until the stack unwinds."""
    try:
        saved = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
    except OSError:  # closed
        stack.callback(os.close, number)
    else:
        stack.callback(os.close, saved)
        stack.callback(os.dup2, saved, number)
    os.dup2(log, number)


def _writes_to(stream: TextIO | None, number: int) -> bool:
    """Whether a Python stream writes to this descriptor; captured ones (pytest, notebooks) do not."""
    if stream is None:
        return False
    try:
        return stream.fileno() == number
    except (AttributeError, OSError, ValueError):  # no descriptor, or closed
        return False


def _flush_standard_streams() -> None:
    """Let what Python holds back go where it belongs before the descriptors change."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()


def _close(stream: TextIO) -> None:
    """Close, even where nobody reads any more."""
    with suppress(OSError):
        stream.close()


def _copy(old: io.BufferedReader, new: int) -> None:
    """Append the rest of an open file to a descriptor."""
    while chunk := old.read(COPY_BYTES):
        view = memoryview(chunk)
        while view:
            view = view[os.write(new, view) :]
