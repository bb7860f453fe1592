"""Each family's tiny checkpoint, loaded once."""

from collections.abc import Iterator

import pytest
from loaded_policies import CHECKPOINTS

import innerloop
from innerloop.engine import LoadedPolicy


@pytest.fixture(scope="session", params=sorted(CHECKPOINTS))
def policy(request: pytest.FixtureRequest) -> Iterator[LoadedPolicy]:
    """Each family in turn."""
    loaded = innerloop.load(CHECKPOINTS[request.param], device="cpu")
    yield loaded
    loaded.close()
