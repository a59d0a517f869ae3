"""The console that the screen draws on: a real terminal, or plain lines without control codes."""

from __future__ import annotations

import os
from typing import IO, TextIO, cast

from rich.console import Console, ConsoleDimensions

UNKNOWN_TERMINALS = ("", "dumb", "unknown")


class TolerantWriter:
    """A text stream that replaces what its encoding lacks, and falls silent when nobody reads any more.

    Training goes on without its display: a closed pipe or a full disk under the display is no reason to stop.
    """

    def __init__(self, stream: TextIO | None) -> None:
        """Wrap a stream; None (a process without standard output) drops everything."""
        self._stream = stream
        self.encoding: str = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write what can be written."""
        if self._stream is not None:
            try:
                self._stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
            except (OSError, ValueError):
                self._stream = None
        return len(text)

    def flush(self) -> None:
        """Flush what can be flushed."""
        if self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._stream = None

    def isatty(self) -> bool:
        """Whether a person looks at it."""
        try:
            return self._stream is not None and self._stream.isatty()
        except ValueError:  # closed
            return False

    def fileno(self) -> int:
        """The descriptor underneath.

        Raises:
            OSError: there is none.
        """
        if self._stream is None:
            raise OSError("no stream")
        return self._stream.fileno()


class SizedConsole(Console):
    """A console as wide as the terminal that it writes to, whatever the standard streams are.

    `is_terminal` says whether lines can be redrawn, `is_tty` whether a person looks at them.
    """

    is_tty: bool = False

    @property
    def size(self) -> ConsoleDimensions:
        """Columns and rows."""
        if self._width is not None and self._height is not None:
            return super().size
        try:
            columns, rows = os.get_terminal_size(self.file.fileno())
        except (OSError, ValueError):
            return super().size
        if columns <= 0 or rows <= 0:  # a terminal that was never told its size
            return super().size
        return ConsoleDimensions(self._width or columns, self._height or rows)

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self._width, self._height = new_size


def open_console(stream: TextIO | None, width: int | None = None) -> SizedConsole:
    """A console on a stream.

    Args:
        stream: where it writes; None drops everything.
        width: columns, in place of the terminal's own.
    """
    writer = TolerantWriter(stream)
    is_tty = writer.isatty()
    is_terminal = is_tty and os.environ.get("TERM", "").lower() not in UNKNOWN_TERMINALS
    console = SizedConsole(
        file=cast(IO[str], writer),
        force_terminal=is_terminal,
        force_interactive=is_terminal,
        color_system="auto" if is_terminal else None,
        width=width,
        markup=False,
        emoji=False,
        highlight=False,
    )
    console.is_tty = is_tty
    return console
