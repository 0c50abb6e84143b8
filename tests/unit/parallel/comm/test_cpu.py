"""Process groups on a host without a GPU."""

from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from parallel.comm.cpu import share_gloo_device


def test_gloo_takes_the_interfaces_that_its_environment_names(monkeypatch):
    monkeypatch.setattr(distributed_c10d, "ProcessGroupGloo", _distributed_c10d.ProcessGroupGloo)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,no-interface")
    share_gloo_device.__wrapped__()
    with pytest.raises(RuntimeError, match="no-interface"):
        distributed_c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=1))
