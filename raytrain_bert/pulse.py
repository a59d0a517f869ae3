"""Signs of life: a thread in every worker tells the board where the worker is, and the driver finds who lags."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

SECONDS_BETWEEN_SIGNS = 3.0
SECONDS_TO_SILENCE = 10.0
"""A worker that has given no sign for so long is stopped, swapped out or cut off."""

PREPARING, COMPUTING, EXCHANGING = 0, 1, 2


class Pulse:
    """Where this worker is. Setting it costs two assignments; the thread does the rest."""

    def __init__(self, board: Any, rank: int) -> None:
        """Say nothing yet; `board` has `sign`, or is None where nobody listens."""
        self._board, self._rank = board, rank
        self._place: tuple[int, int] = (0, PREPARING)
        self._since = time.monotonic()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def set(self, step: int, stage: int) -> None:
        """The worker has come to this stage of this step (counted from 1)."""
        self._place, self._since = (step, stage), time.monotonic()

    def start(self) -> None:
        """Give signs from now on."""
        if self._board is not None:
            self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """No more signs."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _beat(self) -> None:
        who = {"host": socket.gethostname(), "pid": os.getpid()}
        while not self._done.is_set():
            (step, stage), here = self._place, time.monotonic() - self._since
            self._board.sign(self._rank, {"step": step, "stage": stage, "seconds_there": here, **who})
            self._done.wait(SECONDS_BETWEEN_SIGNS)


def who_lags(signs: Mapping[int, Mapping[str, Any]], patience: float) -> str | None:
    """A sentence that names the workers the others wait for; None where there are none.

    Args:
        signs: by rank, the last sign of each (step, stage, seconds_there, host, pid) and its age in seconds.
        patience: seconds that the others must have waited.
    """

    def name(rank: int) -> str:
        return f"worker {rank} ({signs[rank]['host']}, process {signs[rank]['pid']})"

    silent = sorted(rank for rank, sign in signs.items() if sign["age"] > SECONDS_TO_SILENCE)
    if silent and len(silent) == len(signs) > 1:
        return None  # the workers are gone, or none of their signs comes through
    if silent:
        told = [
            f"{name(r)} has given no sign of life for {signs[r]['age']:.0f} s, in step {signs[r]['step']}"
            for r in silent
        ]
        return "; ".join(told)
    if len(signs) < 2:
        return None
    places = {rank: (sign["step"], sign["stage"]) for rank, sign in signs.items()}
    first, last = min(places.values()), max(places.values())
    waiting = [rank for rank, place in places.items() if place == last]
    if first == last or min(signs[rank]["seconds_there"] for rank in waiting) < patience:
        return None
    behind = sorted(rank for rank, place in places.items() if place != last)
    told = [f"{name(r)} is still {STAGES[places[r][1]]} in step {places[r][0]}" for r in behind]
    return "; ".join(told) + f", and the others wait in step {last[0]}"


STAGES = {PREPARING: "preparing its rows", COMPUTING: "computing", EXCHANGING: "exchanging"}
