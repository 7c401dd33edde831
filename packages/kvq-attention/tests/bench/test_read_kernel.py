import pytest
import torch

from kvq_attention.bench.ceilings import READ_WAYS
from kvq_attention.bench.read_kernel import PAGE_WORDS, read_pages

from ..triton.cases import each_device


@each_device
@pytest.mark.parametrize("way", READ_WAYS, ids=str)
def test_every_page_is_read_once_in_the_order_given(device, way):
    """Programs of the same pages give the same sums; a page read twice or never would show."""
    random = torch.Generator().manual_seed(1)
    per_program = way[0] * way[1]
    count = 2 * per_program
    pool = torch.randint(-(2**20), 2**20, (count, PAGE_WORDS), generator=random).int()
    order = torch.randperm(count, generator=random)
    sums = torch.full((2,), -1, dtype=torch.int32, device=device)
    read_pages(pool.to(device), order.int().to(device), sums, *way)
    expected = pool[order].view(2, -1).long().sum(dim=1)
    assert sums.tolist() == expected.tolist()
