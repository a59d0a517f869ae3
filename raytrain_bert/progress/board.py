"""The board between workers and driver: events go one way, the wish to stop the other."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from raytrain_bert.progress.events import Event, plain

CALLS_UNDER_WAY = 4
"""Posts that may be on their way at once; further events wait for the next post."""
EVENTS_KEPT = 10_000
"""Events kept while nobody takes them; the oldest go first."""


class BoardClient(Protocol):
    """The worker's side; can be pickled, and never holds up training."""

    def post(self, events: Sequence[Mapping[str, Any]]) -> bool:
        """Send events; gives what is known about the wish to stop."""

    def stop_requested(self) -> bool:
        """Whether the driver is known to want a stop."""

    def flush(self, timeout_s: float = 5.0) -> None:
        """Wait until everything posted has arrived, at most so long."""

    def for_signs(self) -> SignBoard | None:
        """Where another thread of the worker may leave signs of life; None where nobody looks for them."""


class SignBoard(Protocol):
    """Takes a worker's signs of life."""

    def sign(self, rank: int, sign: dict[str, Any]) -> None:
        """Leave a sign, without waiting."""


class DriverBoard(Protocol):
    """The driver's side."""

    def take(self) -> list[Event]:
        """The events since the last call, in order."""

    def request_stop(self, reason: str) -> None:
        """Ask the workers to save a checkpoint and stop."""

    def signs(self) -> dict[int, dict[str, Any]]:
        """The last sign of life of each rank, with its `age` in seconds; empty where there are none."""


class Board:
    """A queue of events and the wish to stop; safe to use from several threads."""

    def __init__(self) -> None:
        """Start with an empty board."""
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._reason: str | None = None
        self._signs: dict[int, tuple[float, dict[str, Any]]] = {}

    def post(self, events: list[Event]) -> bool:
        """Add events; gives whether a stop is wanted."""
        with self._lock:
            self._events.extend(events)
            return self._reason is not None

    def take(self) -> list[Event]:
        """Remove and return all events."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
            return events

    def request_stop(self, reason: str) -> None:
        """Note that a stop is wanted; the first reason stays."""
        with self._lock:
            self._reason = self._reason or reason

    def stop_requested(self) -> bool:
        """Whether a stop is wanted."""
        with self._lock:
            return self._reason is not None

    def sign(self, rank: int, sign: dict[str, Any]) -> None:
        """Note a sign of life."""
        with self._lock:
            self._signs[rank] = (time.monotonic(), sign)

    def signs(self) -> dict[int, dict[str, Any]]:
        """The last sign of each rank, and its age in seconds."""
        with self._lock:
            now = time.monotonic()
            return {rank: sign | {"age": now - when} for rank, (when, sign) in self._signs.items()}


class LocalBoard:
    """Both sides of a board inside one process, for training in the driver's own process."""

    def __init__(self) -> None:
        """Start with an empty board."""
        self._board = Board()

    def post(self, events: Sequence[Mapping[str, Any]]) -> bool:
        """See BoardClient."""
        return self._board.post([plain(event) for event in events])

    def stop_requested(self) -> bool:
        """See BoardClient."""
        return self._board.stop_requested()

    def flush(self, timeout_s: float = 5.0) -> None:
        """Nothing to wait for: a post has arrived when it returns."""

    def for_signs(self) -> SignBoard | None:
        """Nobody: the driver's own thread is the worker."""
        return None

    def take(self) -> list[Event]:
        """See DriverBoard."""
        return self._board.take()

    def request_stop(self, reason: str) -> None:
        """See DriverBoard."""
        self._board.request_stop(reason)

    def signs(self) -> dict[int, dict[str, Any]]:
        """See DriverBoard: none."""
        return {}


def start_board_actor() -> Any:
    """Start the board as a Ray actor; gives its handle: the actor ends with the last one."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # On the driver's node: the board must not be lost with a worker's node. (A soft affinity was seen to be ignored.)
    here = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(Board).options(num_cpus=0, max_restarts=0, scheduling_strategy=here).remote()


class RemoteBoard:
    """Both sides of a board that lives in a Ray actor; pickled, it carries only the actor's handle.

    A dead actor silences the board: training is worth more than its display.
    """

    def __init__(self, actor: Any) -> None:
        """Connect to the actor that `start_board_actor` gave."""
        self._actor = actor
        self._calls: list[Any] = []
        self._waiting: list[Event] = []
        self._stop = False
        self._taking: Any = None

    def __reduce__(self) -> tuple[type[RemoteBoard], tuple[Any]]:
        return RemoteBoard, (self._actor,)

    def post(self, events: Sequence[Mapping[str, Any]]) -> bool:
        """Send events without waiting; gives the newest answer that has come back."""
        self._waiting.extend(plain(event) for event in events)
        self._read_answers()
        if self._waiting and len(self._calls) < CALLS_UNDER_WAY:
            self._send()
        del self._waiting[:-EVENTS_KEPT]
        return self._stop

    def stop_requested(self) -> bool:
        """The newest answer that has come back; costs no waiting."""
        return self.post([])

    def flush(self, timeout_s: float = 5.0) -> None:
        """Wait until everything posted has arrived, at most so long."""
        import ray

        if self._waiting:
            self._send()
        if self._calls:
            ray.wait(self._calls, num_returns=len(self._calls), timeout=timeout_s)
        self._read_answers()

    def for_signs(self) -> SignBoard | None:
        """A board of its own, for another thread."""
        return RemoteBoard(self._actor)

    def sign(self, rank: int, sign: dict[str, Any]) -> None:
        """Leave a sign of life, without waiting."""
        import ray

        with suppress(ray.exceptions.RayError):
            self._actor.sign.remote(rank, sign)

    def signs(self) -> dict[int, dict[str, Any]]:
        """See DriverBoard; waits a second at most."""
        import ray

        try:
            signs: dict[int, dict[str, Any]] = ray.get(self._actor.signs.remote(), timeout=1.0)
            return signs
        except ray.exceptions.RayError:
            return {}

    def take(self) -> list[Event]:
        """The events since the last call; waits a second at most, an answer that is late comes with the next call."""
        import ray

        try:
            if self._taking is None:
                self._taking = self._actor.take.remote()
            ready, _ = ray.wait([self._taking], timeout=1.0)
            if not ready:
                return []
            call, self._taking = self._taking, None
            events: list[Event] = ray.get(call)
            return events
        except ray.exceptions.RayError:
            self._taking = None
            return []

    def request_stop(self, reason: str) -> None:
        """Ask the workers to stop, without waiting."""
        import ray

        try:
            self._actor.request_stop.remote(reason)
        except ray.exceptions.RayError:
            return

    def _send(self) -> None:
        import ray

        events, self._waiting = self._waiting, []
        try:
            self._calls.append(self._actor.post.remote(events))
        except ray.exceptions.RayError:
            return

    def _read_answers(self) -> None:
        import ray

        if not self._calls:
            return
        ready, self._calls = ray.wait(self._calls, num_returns=len(self._calls), timeout=0)
        for call in ready:
            try:
                self._stop = ray.get(call) or self._stop
            except ray.exceptions.RayError:
                continue
