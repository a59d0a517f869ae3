"""What may go wrong on a worker: its own fault, a peer that is gone, a peer that is late."""

from __future__ import annotations

import os
import re
import socket
import traceback
from collections.abc import Mapping

from raytrain_bert.config.errors import UserError

GONE = re.compile(
    r"connection (closed|reset|refused)|closed by peer|reset by peer|broken pipe|socket.*(closed|error)|"
    r"remote process exited|peer.*(exited|died)|ncclRemoteError|ncclSystemError|NCCL communicator was aborted",
    re.IGNORECASE,
)
LATE = re.compile(
    r"timed out waiting|(wait|operation|collective|store|socket).{0,40}time(d )?out|watchdog.*timeout", re.IGNORECASE
)
EXCHANGES = (
    "RuntimeError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "DistError",
    "CheckpointException",
)
"""What torch.distributed raises, by name: the driver needs no torch to read this."""


class WorkerFault(Exception):
    """Base of what a worker raises that no setting mends; keeps its traceback through Ray."""

    def __init__(self, message: str, trace: str = "") -> None:
        """Args: what went wrong, and the traceback as text."""
        super().__init__(message, trace)
        self.message, self.trace = message, trace

    def __str__(self) -> str:
        return self.message


class WorkerError(WorkerFault):
    """The program itself failed on this worker: it would fail again."""


class PeerLost(WorkerFault):
    """The connection to another worker broke: that one died."""


class PeerLate(WorkerFault):
    """Another worker did not come to an exchange in time."""


def fault_of(error: Exception, *, rank: int, step: int, detail: str = "", timeout_minutes: float = 0) -> Exception:
    """The error as this worker should raise it.

    Args:
        error: what was caught.
        rank: of this worker.
        step: optimizer steps done before.
        detail: what it was about, for example the rows of the batch.
        timeout_minutes: longest wait for another worker.
    """
    if isinstance(error, (UserError, WorkerFault)):
        return error
    where = f"worker {rank} ({socket.gethostname()}, process {os.getpid()}), step {step + 1}"
    trace = "".join(traceback.format_exception(error))
    if type(error).__name__ in EXCHANGES:
        text = str(error)
        if LATE.search(text):
            waited = f"{where}: waited {timeout_minutes:g} min for another worker (--scaling.timeout-minutes)."
            return PeerLate(waited, trace)
        if GONE.search(text):
            return PeerLost(f"{where}: the connection to another worker broke.", trace)
    return WorkerError(f"{type(error).__name__}: {error}\n{where}{'; ' if detail else ''}{detail}", trace)


def is_final(error: BaseException) -> bool:
    """Whether the run should end: true for what the program raised, false for a worker that is lost."""
    return isinstance(error, (UserError, WorkerError, PeerLate))


class WorkersFailed(Exception):
    """Workers raised or died: a line each. What Ray has to say is the cause of this error."""


class GaveUp(Exception):
    """Raised in Ray's controller to end the run: the workers' errors, by rank."""

    def __init__(self, failures: Mapping[int, Exception]) -> None:
        super().__init__(dict(failures))
        self.failures = dict(failures)

    def __str__(self) -> str:
        return "; ".join(f"worker {rank}: {error}" for rank, error in sorted(self.failures.items()))
