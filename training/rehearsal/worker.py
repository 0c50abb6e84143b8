"""The process that ranks are forks of: it has imported everything once, and rehearses nothing
itself.

    python -m training.rehearsal.worker

reads paths of pickled jobs, a line each, and forks a process for each, which writes `PATH.out`. It
answers with `PATH STATUS` when one has ended. When its input ends, as it does when whoever started
it is killed, the jobs that are still under way are killed.
"""

import contextlib
import gc
import os
import pickle
import signal
import sys
import threading
import warnings
from pathlib import Path


def main() -> None:
    """Serve jobs until the input ends."""
    from training.rehearsal import fake_driver

    warnings.filterwarnings("ignore")
    try:
        fake_driver.load()
    except fake_driver.GuardError as error:
        print(f"error {error}", flush=True)
        return
    import torch

    torch.set_num_threads(1)
    # What is compiled when it is imported is rehearsed as the operations it is made of.
    setattr(torch, "compile", uncompiled)  # noqa: B010
    from training.rehearsal import rank  # noqa: F401
    from training.rehearsal.triton_launches import liger_installed, liger_kernels

    if liger_installed():
        liger_kernels()

    gc.freeze()  # forks need not search what they share for garbage
    print("ready", flush=True)
    under_way: set[int] = set()
    for line in sys.stdin:
        path = Path(line.rstrip("\n"))
        child = os.fork()
        if child == 0:
            work(path)
        under_way.add(child)
        threading.Thread(target=reap, args=(child, path, under_way), daemon=True).start()
    for child in tuple(under_way):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def uncompiled(function: object = None, **options: object) -> object:
    """What takes the place of `torch.compile`: the function itself."""
    return (lambda each: each) if function is None else function


def reap(child: int, path: Path, under_way: set[int]) -> None:
    """Say when a child has ended, and how."""
    _, status = os.waitpid(child, 0)
    under_way.discard(child)
    print(f"{path} {os.waitstatus_to_exitcode(status)}", flush=True)


def work(path: Path) -> None:
    """Rehearse one job, write its report, and end this process."""
    from training.rehearsal.rank import Job

    output = os.open(path.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    status = 1
    try:
        job: Job = pickle.loads(path.read_bytes())
        path.with_suffix(".out").write_bytes(pickle.dumps(job.perform()))
        status = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    finally:
        # No cleaning up: fake tensors and their modes die with the process.
        os._exit(status)


if __name__ == "__main__":
    main()
