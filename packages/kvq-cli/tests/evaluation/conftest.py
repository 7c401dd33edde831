"""Evaluations of tiny models, whose steps are too short to share between threads."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def never_shared():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
