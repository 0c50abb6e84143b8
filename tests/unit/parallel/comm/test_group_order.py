"""The ranks and timeouts of process groups, tested with fake groups on layouts in which all axes
are larger than 1."""

from datetime import timedelta
from inspect import signature

import numpy as np
import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from models.layout import Layout
from parallel.comm import groups
from parallel.comm.groups import Axis, Groups

LAYOUTS = [
    (32, Layout(tensor=2, pipeline=2, context=2, expert=2, expert_tensor=2)),
    (48, Layout(tensor=2, pipeline=2, context=3, expert=3, expert_tensor=4)),
    (48, Layout(tensor=4, pipeline=3, virtual_pipeline=2, context=2, expert=4, expert_tensor=2)),
    (24, Layout(tensor=3, pipeline=2, context=2, expert=2, expert_tensor=1)),
]


@pytest.fixture
def sent_nowhere(monkeypatch):
    """Provide process groups of any number of ranks in this process."""
    begin, new = dist.init_process_group, dist.new_group

    def initialize(backend, *, rank, world_size, timeout, **_):
        begin("fake", rank=rank, world_size=world_size, store=FakeStore(), timeout=timeout)

    def new_group(ranks=None, timeout=None, **_):
        return new(ranks, timeout, backend="fake")

    monkeypatch.setattr(dist, "init_process_group", initialize)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    yield
    groups.shutdown()


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS, ids=str)
def test_groups_have_the_ranks_of_their_axes_in_order(ranks, layout, sent_nowhere, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    dense = np.arange(ranks).reshape(layout.pipeline, -1, layout.context, layout.tensor)
    experts = np.arange(ranks).reshape(layout.pipeline, -1, layout.expert, layout.expert_tensor)
    for rank in range(ranks):
        monkeypatch.setenv("RANK", str(rank))
        made = groups.initialize(layout, device_type="cpu")
        p, d, c, t = np.argwhere(dense == rank)[0]
        _, copy, e, part = np.argwhere(experts == rank)[0]
        assert members(made) == {
            "tensor": [*dense[p, d, c]],
            "pipeline": [*dense[:, d, c, t]],
            "data": [*dense[p, :, c, t]],
            "context": [*dense[p, d, :, t]],
            "expert": [*experts[p, copy, :, part]],
            "dense.tensor": [*dense[p, d, c]],
            "dense.replicas": [*dense[p, :, :, t].flat],
            "dense.stage": [*dense[p].flat],
            "experts.tensor": [*experts[p, copy, e]],
            "experts.replicas": [*experts[p, :, e, part]],
            "experts.stage": [*experts[p, :, e].flat],
        }
        for domain in (made.dense, made.experts):  # as in the docstring of Domain
            number = domain.tensor.rank + domain.tensor.size * domain.replicas.rank
            assert domain.stage.rank == number
        assert made.dense.divisor == made.experts.divisor == dense[0, :, :, 0].size
        groups.shutdown()


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS[1:], ids=str)
def test_collectives_of_every_group_wait_as_long_as_asked(ranks, layout, sent_nowhere, monkeypatch):
    make, limits = distributed_c10d._new_process_group_helper, []
    parameters = signature(make)

    def made(*arguments, **options):
        limits.append(parameters.bind(*arguments, **options).arguments["timeout"])
        return make(*arguments, **options)

    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", made)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    groups.initialize(layout, timeout_seconds=77.0, device_type="cpu")
    assert len(limits) > 10 and {*limits} == {timedelta(seconds=77)}


def axes_of(made: Groups) -> dict[str, Axis]:
    """Return every axis by name."""
    axes: dict[str, Axis] = {
        name: getattr(made, name) for name in ("tensor", "pipeline", "data", "context", "expert")
    }
    for domain in ("dense", "experts"):
        for name in ("tensor", "replicas", "stage"):
            axes[f"{domain}.{name}"] = getattr(getattr(made, domain), name)
    return axes


def members(made: Groups) -> dict[str, list[int]]:
    """Return the ranks of each axis in order, and check this rank's position in each axis."""
    found = {}
    for name, axis in axes_of(made).items():
        found[name] = dist.get_process_group_ranks(axis.group)
        assert found[name][axis.rank] == made.rank and len(found[name]) == axis.size
    return found
