"""What tests of the few-row kernels stand on."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def poisoned_allocations() -> Iterator[None]:
    """Every torch.empty is NaN."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
