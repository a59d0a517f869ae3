"""Signs of life, and who is found to lag."""

from __future__ import annotations

import threading
from typing import Any

from raytrain_bert.progress.board import Board
from raytrain_bert.pulse import COMPUTING, EXCHANGING, PREPARING, Pulse, who_lags


def sign(step: int, stage: int, *, there: float = 60.0, age: float = 1.0, pid: int = 7) -> dict[str, Any]:
    return {"step": step, "stage": stage, "seconds_there": there, "age": age, "host": "here", "pid": pid}


def test_a_silent_worker_is_named_with_its_step() -> None:
    signs = {0: sign(12, EXCHANGING), 1: sign(12, COMPUTING, age=40.0, pid=8)}
    assert who_lags(signs, 5) == "worker 1 (here, process 8) has given no sign of life for 40 s, in step 12"


def test_where_all_are_silent_nothing_is_known_of_who_lags() -> None:
    assert who_lags({0: sign(12, EXCHANGING, age=20.0), 1: sign(12, COMPUTING, age=40.0)}, 5) is None
    assert who_lags({0: sign(12, COMPUTING, age=40.0)}, 5) is not None


def test_a_worker_that_the_others_wait_for_is_named() -> None:
    signs = {0: sign(12, EXCHANGING), 1: sign(12, PREPARING, pid=8), 2: sign(12, EXCHANGING)}
    assert who_lags(signs, 5) == (
        "worker 1 (here, process 8) is still preparing its rows in step 12, and the others wait in step 12"
    )
    assert who_lags({0: sign(13, COMPUTING), 1: sign(12, EXCHANGING)}, 5) is not None


def test_nobody_lags_where_all_are_at_one_place_or_the_wait_is_short() -> None:
    assert who_lags({0: sign(12, COMPUTING), 1: sign(12, COMPUTING)}, 5) is None
    assert who_lags({0: sign(12, EXCHANGING, there=1.0), 1: sign(12, COMPUTING)}, 5) is None
    assert who_lags({0: sign(12, COMPUTING)}, 5) is None
    assert who_lags({}, 5) is None


def test_a_pulse_tells_the_board_where_its_worker_is() -> None:
    board, told = Board(), threading.Event()

    class Told:
        def sign(self, rank: int, sign: dict[str, Any]) -> None:
            board.sign(rank, sign)
            told.set()

    pulse = Pulse(Told(), 3)
    pulse.set(5, COMPUTING)
    pulse.start()
    assert told.wait(10)
    pulse.stop()
    (rank,) = board.signs()
    got = board.signs()[rank]
    assert (rank, got["step"], got["stage"]) == (3, 5, COMPUTING)
    assert got["age"] >= 0


def test_without_a_board_there_is_no_thread() -> None:
    before = threading.active_count()
    pulse = Pulse(None, 0)
    pulse.start()
    assert threading.active_count() == before
    pulse.stop()
