"""Log of allocations: the bytes of each allocation and each free, in order."""

from __future__ import annotations

import torch

from launcher.extensions.forecast.allocation_log import AllocationLog


def test_allocations_and_frees_in_order() -> None:
    with AllocationLog(torch.device("cpu")) as log:
        a = torch.zeros(100)
        b = a.view(10, 10)
        c = torch.zeros(50)
        del a, b
        c.untyped_storage().resize_(0)
        c.untyped_storage().resize_(200)
    assert log.events == [400, 200, -400, -200, 200]


def test_sizes_are_rounded_up() -> None:
    with AllocationLog(torch.device("cpu"), 512) as log:
        torch.zeros(100)
    assert log.events == [512, -512]
