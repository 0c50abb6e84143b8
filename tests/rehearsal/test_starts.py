"""What a rank over NCCL does before its first step."""

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from parallel.comm import groups
from tests.rehearsal.programs import called


def one_group_of_the_hosts() -> None:
    """Fail unless one group is over gloo, and all of the layout's are over NCCL."""
    layout = groups.initialize(device_type="cuda")
    backends = [dist.get_backend(group) for group in c10d._world.pg_map]
    assert backends.count("gloo") == 1 < backends.count("nccl"), backends
    assert dist.get_backend(layout.host) == "gloo"


def test_hosts_have_one_group_of_their_own(processes):
    """Megatron makes a twin over gloo of most of its groups unless it is told not to: each is a
    mesh of sockets of its own."""
    called(processes, one_group_of_the_hosts)
