"""Fixtures that more than one test module uses."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A small local Ray, for the tests that read or compute with Ray Data."""
    # A user's cluster must not run the tests, and its first-run notices must not end up in them.
    address = os.environ.pop("RAY_ADDRESS", None)
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
    if address is not None:
        os.environ["RAY_ADDRESS"] = address
