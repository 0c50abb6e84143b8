"""How a rank ends whose run breaks under NCCL, which would wait for peers."""

from tests.rehearsal.programs import H100, program
from training.rehearsal.rank import TracedCall


def test_a_rank_whose_device_fails_says_so_and_waits_for_nobody(processes, tmp_path):
    config = program(tmp_path, 1, data__mock=True, run__device="cuda")
    call = TracedCall("tests.rehearsal.exits:device_error", (config,), H100)
    (report,) = processes.perform([call])
    assert report.error is None, report.error
