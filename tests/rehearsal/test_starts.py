"""What starting a run takes under NCCL."""

from tests.rehearsal.programs import H100
from training.rehearsal.rank import TracedCall


def test_hosts_have_one_group_of_their_own(processes):
    """Megatron makes a twin over gloo of most of its groups unless it is told not to: each is a
    mesh of sockets of its own."""
    call = TracedCall("tests.rehearsal.starts:one_group_of_the_hosts", (), H100)
    (report,) = processes.perform([call])
    assert report.error is None, report.error
