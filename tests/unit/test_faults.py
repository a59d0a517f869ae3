"""What a worker's error is taken for, and what the driver makes of the errors of all."""

from __future__ import annotations

import pickle

import pytest

from raytrain_bert.config.errors import DataError, ResourceError
from raytrain_bert.driver import cause, failures_of, told
from raytrain_bert.faults import GaveUp, PeerLate, PeerLost, WorkerError, fault_of, is_final

# As gloo, NCCL and torch.distributed.checkpoint were seen to say it, or as their sources do.
GONE = [
    RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"
    ),
    RuntimeError("Application timeout caused pair closure: Connection reset by peer"),
    RuntimeError("NCCL error: remote process exited or there was a network error"),
    RuntimeError("[gloo/transport/tcp/pair.cc] writev [10.0.0.1]:1: Broken pipe"),
]
LATE = [
    RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 15000ms for recv"
    ),
    RuntimeError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE)"),
]


def fault(error: Exception) -> Exception:
    return fault_of(error, rank=1, step=11, detail="rows of the batch: a.csv row 3", timeout_minutes=2)


@pytest.mark.parametrize("error", GONE, ids=range(len(GONE)))
def test_a_broken_connection_is_a_lost_peer_and_worth_another_try(error: Exception) -> None:
    got = fault(error)
    assert isinstance(got, PeerLost)
    assert not is_final(got)
    assert "worker 1" in str(got)
    assert "step 12" in str(got)


@pytest.mark.parametrize("error", LATE, ids=range(len(LATE)))
def test_a_timeout_is_a_late_peer_and_ends_the_run(error: Exception) -> None:
    got = fault(error)
    assert isinstance(got, PeerLate)
    assert is_final(got)
    assert "waited 2 min" in str(got)


@pytest.mark.parametrize(
    "error", [IndexError("index out of range"), RuntimeError("mat1 and mat2 shapes cannot be multiplied"), OSError("x")]
)
def test_anything_else_is_the_workers_own_with_step_and_rows(error: Exception) -> None:
    got = fault(error)
    assert isinstance(got, WorkerError)
    assert is_final(got)
    assert str(got).startswith(f"{type(error).__name__}: {error}\nworker 1 (")
    assert str(got).endswith("step 12; rows of the batch: a.csv row 3")


def test_what_the_user_can_fix_stays_as_it_is_and_is_final() -> None:
    error = ResourceError("out of memory")
    assert fault(error) is error
    assert is_final(error)


def test_faults_survive_the_way_through_ray() -> None:
    try:
        raise ValueError("x")
    except ValueError as error:
        got = pickle.loads(pickle.dumps(fault(error)))
    assert isinstance(got, WorkerError)
    assert str(got).startswith("ValueError: x\nworker 1 (")
    assert "test_faults_survive_the_way_through_ray" in got.trace
    gave_up = pickle.loads(pickle.dumps(GaveUp({1: got})))
    assert str(gave_up.failures[1]) == str(got)


class ControllerError(Exception):
    """As Ray's: wraps what a callback in its controller raised."""

    def __init__(self, controller_failure: Exception) -> None:
        super().__init__(str(controller_failure))
        self.controller_failure = controller_failure


class WorkerGroupError(Exception):
    """As Ray's: the workers' errors by rank."""

    def __init__(self, worker_failures: dict[int, Exception]) -> None:
        super().__init__("Training failed due to worker errors")
        self.worker_failures = worker_failures


def test_the_one_that_failed_is_told_and_not_those_that_lost_it() -> None:
    own, lost = fault(IndexError("row")), fault(GONE[0])
    for error in (ControllerError(GaveUp({0: lost, 1: own})), WorkerGroupError({0: lost, 1: own})):
        failed = cause(error)
        assert str(failed).startswith("IndexError: row\nworker 1 (")
        assert "connection" not in str(failed)
        assert failed.__cause__ is error
        assert "IndexError" in failed.__notes__[0]


def test_a_late_peer_is_named_where_it_is_known() -> None:
    late = fault(LATE[0])
    text = str(
        cause(ControllerError(GaveUp({1: late})), "worker 0 (here, process 7) has given no sign of life for 40 s")
    )
    assert "waited 2 min for another worker" in text
    assert text.endswith("worker 0 (here, process 7) has given no sign of life for 40 s.")


def test_what_the_user_can_fix_goes_before_everything() -> None:
    error = ControllerError(GaveUp({0: fault(GONE[0]), 1: DataError("row 3")}))
    assert isinstance(cause(error), DataError)
    assert set(failures_of(error)) == {0, 1}


def test_a_death_is_told_in_a_few_words() -> None:
    text = "The actor died unexpectedly before finishing this task.\n\tclass_name: RayTrainWorker\n\tpid: 12"
    assert told(RuntimeError(text)) == "the process has died"
    assert told(ValueError("bad\nValueError: this line")) == "ValueError: this line"
