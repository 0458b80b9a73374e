"""Devices, groups of processes, and cases to run on them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from reference import Case

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=NO_CUDA)]
FLAGS = {
    "plain": {},
    "permute_x": {"permute_x": True},
    "permute_y": {"permute_y": True},
    "permute_y_mul": {"permute_y": True, "fuse_mul_post": True},
}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Any]]:
    """ranks(2) is a group of two processes, one for all tests. A group in which a rank failed is replaced."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("torch has no gloo")
    from distributed.ranks import Ranks

    groups: dict[int, Ranks] = {}

    def of_size(size: int) -> Ranks:
        if size not in groups or not groups[size].alive:
            groups[size] = Ranks(size)
        return groups[size]

    yield of_size
    for group in groups.values():
        group.close()


@pytest.fixture(autouse=True, scope="session")
def tuning_cache(tmp_path_factory: pytest.TempPathFactory):
    """What tests measure with autotune=True stays out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEGEMM_CACHE_DIR", str(tmp_path_factory.mktemp("tuning")))
        yield


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def make_case(
    device: str = "cpu",
    flags: str = "plain",
    dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int32,
    tokens: int = 13,
    topk: int = 2,
    experts: int = 5,
    n: int = 24,
    k: int = 40,
    weights_dtype: torch.dtype = torch.float32,
    expert_ids: torch.Tensor | None = None,
    unrouted: int = 0,
) -> Case:
    """A random routed case; the last `unrouted` routed rows belong to no expert of this rank."""
    named = FLAGS[flags]
    if expert_ids is None:
        # Expert 1 stays empty.
        choice = torch.tensor([e for e in range(experts) if e != 1 or experts < 3])
        expert_ids = choice[torch.randint(len(choice), (tokens, topk))]
        if unrouted:
            expert_ids.view(-1)[-unrouted:] = -1
    flat = expert_ids.reshape(-1)
    order = torch.where(flat < 0, experts, flat).sort(stable=True).indices
    rows = tokens if named.get("permute_x") else tokens * topk
    case = Case(
        X=torch.randn(rows, k),
        W=torch.randn(experts, n, k) * k**-0.5,
        m_sizes=torch.bincount(flat[flat >= 0], minlength=experts)[:experts].to(device, index_dtype),
        topk=topk,
        gather_indices=order.to(device, index_dtype) if named else None,
        topk_weights=torch.rand(tokens, topk).to(device, weights_dtype) if "fuse_mul_post" in named else None,
        **named,
    )
    case.X, case.W = case.X.to(device, dtype), case.W.to(device, dtype)
    return case
