"""A Ray cluster of several nodes on this machine, started and broken as its operator would."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

from tests.integration.running import environment, processes_of

ADDRESS_FILE = Path("/tmp/ray/ray_current_cluster")


class Cluster:
    """A head and more nodes, each with raylet and object store of its own; ends with the context."""

    def __init__(self, folder: Path, cpus: int = 1, *, dashboard: bool = False) -> None:
        """`folder` is the home of everything; every node has `cpus` CPUs; jobs need a dashboard."""
        self.folder, self.cpus, self.marker, self.dashboard = folder, cpus, uuid.uuid4().hex, dashboard
        self.port, self.dashboard_port = free_port(), free_port()
        self.raylets: list[int] = []
        """Process of each node in the order of their start, the head first."""
        (folder / "home").mkdir(exist_ok=True)

    @property
    def address(self) -> str:
        """What --scaling.address takes."""
        return f"127.0.0.1:{self.port}"

    @property
    def jobs_address(self) -> str:
        """What submit takes."""
        return f"http://127.0.0.1:{self.dashboard_port}"

    @property
    def extra(self) -> dict[str, str]:
        """Environment of a program that joins: Ray's token lies in the home that it shares."""
        return {"RAY_AUTH_MODE": "token"}

    def __enter__(self) -> Cluster:
        self.ray("get-auth-token", "--generate")
        dashboard = [f"--include-dashboard={'true' if self.dashboard else 'false'}"]
        dashboard += [f"--dashboard-port={self.dashboard_port}", "--dashboard-host=127.0.0.1"] if self.dashboard else []
        self.start("--head", f"--port={self.port}", *dashboard)
        return self

    def __exit__(self, *exception: object) -> None:
        for pid in processes_of(self.marker):
            kill(pid)
        # `ray start` leaves its address where the next ray.init() of this machine looks for a cluster.
        if ADDRESS_FILE.is_file() and ADDRESS_FILE.read_text(encoding="utf-8").strip().endswith(f":{self.port}"):
            ADDRESS_FILE.unlink()

    def add_node(self) -> None:
        """One more node joins."""
        self.start(f"--address={self.address}")

    def kill_node(self, number: int) -> None:
        """The node is gone without a word: its raylet, and so all that ran on it."""
        kill(self.raylets[number])

    def start(self, *flags: str) -> None:
        """`ray start`, and note the raylet that it leaves."""
        before = set(self.living_raylets())
        if self.dashboard:  # two clusters on one machine do not meet
            flags += (f"--dashboard-agent-listen-port={free_port()}",)
        limits = (f"--num-cpus={self.cpus}", "--num-gpus=0", f"--object-store-memory={200 * 2**20}")
        self.ray("start", *flags, *limits, "--disable-usage-stats")
        (raylet,) = set(self.living_raylets()) - before
        self.raylets.append(raylet)

    def ray(self, *words: str) -> None:
        """Ray's command line, with the home and the marker of this cluster."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        subprocess.run(
            [str(Path(sys.executable).parent / "ray"), *words],
            cwd=self.folder,
            # Jobs run the first python of the head node's path, as on a machine whose environment is activated.
            env=environment(self.folder / "home", self.marker, gpus=False) | self.extra | {"PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=120,
            check=True,
        )

    def living_raylets(self) -> list[int]:
        """Processes of the nodes."""
        return [pid for pid, line in processes_of(self.marker).items() if line.split(" ")[0].endswith("/raylet")]


def kill(pid: int) -> None:
    """SIGKILL, where the process is still there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def free_port() -> int:
    """A TCP port that nobody listens on just now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
