from __future__ import annotations

import pickle
import threading

import numpy as np

from raytrain_bert.progress.board import EVENTS_KEPT, Board, LocalBoard, RemoteBoard


def test_take_gives_every_event_once_and_in_order():
    board = Board()
    board.post([{"n": 0}, {"n": 1}])
    board.post([{"n": 2}])
    assert [event["n"] for event in board.take()] == [0, 1, 2]
    assert board.take() == []


def test_a_post_tells_whether_a_stop_is_wanted():
    board = Board()
    assert board.post([]) is False
    assert not board.stop_requested()
    board.request_stop("SIGINT")
    assert board.post([{"n": 0}]) is True
    assert board.stop_requested()
    assert board.take() == [{"n": 0}]
    assert board.stop_requested()


def test_no_event_is_lost_or_doubled_between_threads():
    board, taken, threads_done = Board(), [], threading.Event()

    def post(thread: int) -> None:
        for number in range(500):
            board.post([{"thread": thread, "number": number}])

    def take() -> None:
        while not threads_done.is_set():
            taken.extend(board.take())
        taken.extend(board.take())

    writers = [threading.Thread(target=post, args=(thread,)) for thread in range(4)]
    reader = threading.Thread(target=take)
    reader.start()
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    threads_done.set()
    reader.join()
    for thread in range(4):
        assert [event["number"] for event in taken if event["thread"] == thread] == list(range(500))


def test_a_board_that_nobody_reads_keeps_the_newest_events():
    board = Board()
    board.post([{"n": n} for n in range(EVENTS_KEPT + 5)])
    assert [event["n"] for event in board.take()] == list(range(5, EVENTS_KEPT + 5))


def test_a_local_board_joins_both_sides():
    board = LocalBoard()
    assert board.post([{"event": "phase", "text": "a", "rows": np.int64(3)}]) is False
    board.request_stop("SIGTERM")
    assert board.stop_requested()
    assert board.post([]) is True
    board.flush()
    (event,) = board.take()
    assert event == {"event": "phase", "text": "a", "rows": 3}
    assert type(event["rows"]) is int


def test_a_remote_board_is_pickled_as_nothing_but_its_actor():
    board = RemoteBoard("actor handle")
    board._waiting.append({"event": "note", "text": "not yet sent"})
    copy = pickle.loads(pickle.dumps(board))
    assert isinstance(copy, RemoteBoard)
    assert copy._actor == "actor handle"
    assert copy._waiting == []
