"""Groups of processes for the tests of this folder, one of each size for all of them."""

from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist
from distributed.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """ranks(2) is a group of two processes. A group in which a rank failed is replaced."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch has no gloo")
    groups: dict[int, Ranks] = {}

    def of_size(size: int) -> Ranks:
        if size not in groups or not groups[size].alive:
            groups[size] = Ranks(size)
        return groups[size]

    yield of_size
    for group in groups.values():
        group.close()
