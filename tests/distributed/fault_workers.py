"""Kill a save, let it fail once or fill the disk, at each disk access of the save, or make a folder
of the run read-only.

For every fault, a process without process groups is forked. The fork resumes a run from its
checkpoint at step 2, and the fault occurs while it saves step 3. A second fork resumes the run and
trains to step 4.
"""

import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import filesystem

import pretrain
from tests.run_configs import tiny_config
from tests.run_results import metrics_of, same_state, state_of

GOOD, FAULTY, END = 2, 3, 4
WRITES = os.O_WRONLY | os.O_RDWR
EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
SETTINGS = [
    f"train.steps={END}",
    "train.global_batch=2",
    "train.precision=bf16",
    "checkpoint.interval=1",
    "log.interval=1",
    "checkpoint.keep_last=2",
    "validation.samples=2",
    "validation.interval=1",
]
STRIDES = {"kill": 1, "error once": 2, "full disk": 4}
"""Maps each action to the interval between the points at which it is tested."""
ENTRIES = 8  # number of a file's tensors per point

ERRORS = {"full disk": errno.ENOSPC, "read-only": errno.EROFS}
ONCE = {"error once": errno.EIO}


@dataclass(frozen=True)
class Fault:
    """An action at the `point`-th disk access of the trainer or its writer. Actions in `ERRORS`
    apply to all later accesses, too."""

    process: str
    point: int
    action: str


class Disk:
    """Counts how often this process and its writer access a folder, and triggers the fault at its
    point."""

    def __init__(self, place: Path, fault: Fault | None) -> None:
        self.place = str(place)
        self.fault = fault
        self.owner = os.getpid()
        self.counts = {"trainer": 0, "writer": 0}
        self.entries = 0
        self._write = filesystem._write_item
        self._fsync = os.fsync
        os.fsync = self.fsync
        filesystem._write_item = self.write_item
        sys.addaudithook(self.audit)

    def touch(self) -> None:
        """Count one point."""
        process = "trainer" if os.getpid() == self.owner else "writer"
        self.counts[process] += 1
        if self.fault is None:
            Path(f"{self.place}.{process}").write_text(str(self.counts[process]))
        elif self.meets(process):
            if self.fault.action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            code = (ERRORS | ONCE)[self.fault.action]
            raise OSError(code, os.strerror(code), self.place)

    def meets(self, process: str) -> bool:
        """Return whether the fault happens now. A second writer starts at the trainer's count, so a
        fault that happens only once leaves a marker file."""
        fault = self.fault
        assert fault is not None
        past = process == fault.process and self.counts[process] >= fault.point
        if fault.action in ERRORS:
            return past
        happened = f"{self.place}.happened"
        if not past or os.path.exists(happened):
            return False
        os.close(os.open(happened, os.O_CREAT))
        return True

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Count Python's calls to the operating system."""
        if event not in EVENTS or (event == "open" and not arguments[2] & WRITES):
            return
        path = str(arguments[0])
        if event in ("os.remove", "os.rmdir") and arguments[1] >= 0:  # relative paths
            path = os.path.join(os.readlink(f"/proc/self/fd/{arguments[1]}"), path)
        nameless = event == "open" and path == self.place
        if nameless or path.startswith(self.place + "/"):
            self.touch()

    def fsync(self, descriptor: int) -> None:
        """Count one point before each sync to the disk."""
        self.touch()
        self._fsync(descriptor)

    def write_item(self, *arguments: Any, **options: Any) -> Any:
        """Call torch's function and count points within a file."""
        self.entries += 1
        if self.entries % ENTRIES == 0:
            self.touch()
        return self._write(*arguments, **options)


def forked(call: Callable[[], int], output: Path) -> int:
    """Run `call` in a fork and return its exit code, or minus the signal number if a signal killed
    it."""
    pid = os.fork()
    if pid == 0:
        code = 99
        with output.open("w") as file, redirect_stdout(file), redirect_stderr(file):
            try:
                code = call()
            except BaseException as error:
                print(f"Traceback: {error!r}")
            file.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Runs:
    """The run with faults, and the run without."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tiny_config(str(folder), "adamw")
        for name, step in (("whole", END), ("good", GOOD)):
            code, said = self.start(name, step)
            assert code == 0, said
        self.expected = {step: state_of(folder / "whole", step) for step in (FAULTY, END)}
        self.metrics = metrics_of(folder / "whole")

    def start(
        self, name: str, step: int, fault: Fault | None = None, watched: str | None = None
    ) -> Any:
        """Start the run `name` in a fork and train up to `step`. Return its exit code and output.

        watched    subfolder of the run in which the fault may happen
        """
        run_dir = self.folder / name

        def run() -> int:
            if watched is not None:
                Disk(run_dir / watched, fault)
            config = ["--config", str(self.folder / "config.yaml"), f"run.dir={run_dir}"]
            return pretrain.main([*config, *SETTINGS, f"train.exit_step={step}"])

        output = self.folder / f"{name}.txt"
        return forked(run, output), output.read_text()

    def points(self) -> dict[str, int]:
        """Return the number of points that a save passes in each process."""
        shutil.copytree(self.folder / "good", self.folder / "counted")
        code, said = self.start("counted", FAULTY, None, "checkpoints")
        assert code == 0, said
        place = self.folder / "counted" / "checkpoints"
        return {name: int(Path(f"{place}.{name}").read_text()) for name in ("trainer", "writer")}

    def meet(self, fault: Fault, name: str) -> dict[str, Any]:
        """Trigger the fault in the run `name`, start the run again, and report the outcome."""
        self.copy_good(name)
        code, said = self.start(name, FAULTY, fault, "checkpoints")
        expected = None if fault.action in ERRORS else 0
        if fault == Fault("trainer", fault.point, "kill"):
            expected = -signal.SIGKILL
        return {"fault": vars(fault), **self.verdict(name, code, said, expected)}

    def read_only(self, place: str, expected: int) -> dict[str, Any]:
        """Start a run with a read-only folder, and report the outcome."""
        self.copy_good("read-only")
        fault = Fault("trainer", 1, "read-only")
        code, said = self.start("read-only", FAULTY, fault, place)
        return {"place": place, **self.verdict("read-only", code, said, expected)}

    def copy_good(self, name: str) -> None:
        """Replace the run `name` with a copy of the run without faults."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        shutil.copytree(self.folder / "good", self.folder / name)

    def verdict(self, name: str, code: int, said: str, expected: int | None) -> dict[str, Any]:
        """Return the output of a start of `name` with a fault, the step at which the next start
        resumes, and the problems found.

        `expected` is the required exit code of the start with a fault. None allows 2 if the attempt
        to write before training failed, else 0 or 1.
        """
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        again, continued = self.start(name, END)
        lines = [line for line in continued.splitlines() if line.startswith("continuing from ")]
        problems = []
        if "Traceback" in said + continued:
            problems.append("a traceback")
        varying = (2,) if "cannot write to run.dir" in said else (0, 1)
        if code not in (varying if expected is None else (expected,)):
            problems.append(f"ended with {code}: {said}")
        if code in (1, 2) and len(errors) != 1:
            problems.append(f"{len(errors)} lines of error")
        if again != 0 or len(lines) != 1:
            problems.append(f"continued with {again}: {continued}")
        else:
            problems += self.compare(name)
        step = int(lines[0][-8:]) if lines else None
        return {"said": errors, "from": step, "problems": problems}

    def compare(self, name: str) -> list[str]:
        """Return the differences from the run without faults."""
        found = []
        for step in (FAULTY, END):
            if different := same_state(state_of(self.folder / name, step), self.expected[step]):
                found.append(f"step {step}: {len(different)} tensors differ")
        if metrics_of(self.folder / name) != self.metrics:
            found.append("metrics differ")
        names = {path.name for path in (self.folder / name / "checkpoints").iterdir()}
        if extra := names - {"latest", *(f"step_{step:08d}" for step in (FAULTY, END))}:
            found.append(f"left over: {extra}")
        return found


def report(folder: str, stride: int, workers: int = 2) -> dict[str, Any]:
    """Test every `stride`-th point in several processes in parallel.

    Returns the number of points, and the outcomes of all faults and of all read-only folders.
    """
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"):
        del os.environ[name]  # one process per run
    runs = Runs(Path(folder))
    counts = runs.points()
    faults = [
        Fault(process, point, action)
        for process, count in counts.items()
        for action, times in STRIDES.items()
        for point in range(1 + stride // 2, count + 1, stride * times)
    ]

    def meet_all(worker: int) -> None:
        met = [runs.meet(fault, f"faulty{worker}") for fault in faults[worker::workers]]
        (runs.folder / f"met{worker}.json").write_text(json.dumps(met))

    pids = []
    for worker in range(workers):
        pid = os.fork()
        if pid == 0:
            meet_all(worker)
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    files = [runs.folder / f"met{worker}.json" for worker in range(workers)]
    return {
        "points": sum(counts.values()),
        "faults": [met for file in files for met in json.loads(file.read_text())],
        "places": [runs.read_only(".", expected=2), runs.read_only("checkpoints", expected=2)],
    }
