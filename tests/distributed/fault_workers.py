"""Kills a save, or fills the disk, at every point where the save touches the disk.

Some faults are real: runs in folders that are full or read-only.

    python -m tests.distributed.fault_workers FOLDER STRIDE

FOLDER holds a token set; every STRIDE-th point is met. For every fault a process that has no
process group yet is forked: the fork continues a run from its checkpoint of step 2 and meets the
fault while it saves step 3. A second fork then continues the run to step 4. The outcome of every
fault goes to report.json.
"""

import ctypes
import errno
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async

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
FULL_DISKS = 4  # every so many points are met with a full disk too
ENTRIES = 8  # every so many tensors of a file are a point of their own

NEW_USER, NEW_MOUNTS = 0x10000000, 0x00020000  # of unshare(2)
READ_ONLY = "mount --bind '{0}' '{0}' && mount -o remount,ro,bind '{0}'"
FULL = "mount -t tmpfs -o size={1}k tmpfs '{0}' && cp -a '{2}/.' '{0}'"
PLACES = {
    "full file system": FULL,
    "read-only run folder": READ_ONLY,
    "read-only checkpoints": READ_ONLY,
}


@dataclass(frozen=True)
class Fault:
    """What happens when the trainer or its writer touches the disk for the `point`-th time."""

    process: str
    point: int
    action: str


class Disk:
    """Counts how often this process and its writer touch the checkpoints on the disk.

    It acts when the fault's point is reached.
    """

    def __init__(self, place: Path, fault: Fault | None) -> None:
        self.place = str(place)
        self.fault = fault
        self.owner = os.getpid()
        self.counts = {"trainer": 0, "writer": 0}
        self.entries = 0
        self._write = filesystem_async._write_item
        self._fsync = os.fsync
        os.fsync = self.fsync
        # megatron-core inspects the signature of this function.
        filesystem_async._write_item = functools.wraps(self._write)(
            lambda *a, **o: self.write_item(*a, **o)
        )
        sys.addaudithook(self.audit)

    def touch(self) -> None:
        """Count one point."""
        process = "trainer" if os.getpid() == self.owner else "writer"
        self.counts[process] += 1
        if self.fault is None:
            Path(f"{self.place}.{process}").write_text(str(self.counts[process]))
        elif (process, self.counts[process]) == (self.fault.process, self.fault.point):
            if self.fault.action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.place)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Count what Python asks of the operating system."""
        if event not in EVENTS or (event == "open" and not arguments[2] & WRITES):
            return
        path = str(arguments[0])
        if event in ("os.remove", "os.rmdir") and arguments[1] >= 0:  # relative to a folder
            path = os.path.join(os.readlink(f"/proc/self/fd/{arguments[1]}"), path)
        if path.startswith(self.place + "/"):
            self.touch()

    def fsync(self, descriptor: int) -> None:
        """Count a point before something is synced to the disk."""
        self.touch()
        self._fsync(descriptor)

    def write_item(self, *arguments: Any, **options: Any) -> Any:
        """Call torch's function and count points in the middle of a file."""
        self.entries += 1
        if self.entries % ENTRIES == 0:
            self.touch()
        return self._write(*arguments, **options)


def forked(call: Callable[[], int], output: Path) -> int:
    """Run `call` in a fork and return its exit code, or minus the signal that killed it."""
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


def own_mounts() -> bool:
    """Whether this process, a fork with one thread, may mount for itself alone."""
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None).unshare(NEW_USER | NEW_MOUNTS) != 0:
        return False
    maps = {"setgroups": "deny", "uid_map": f"0 {user} 1", "gid_map": f"0 {group} 1"}
    for file, text in maps.items():
        Path(f"/proc/self/{file}").write_text(text)
    command = ["mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(command, capture_output=True).returncode == 0


class Runs:
    """The run that meets faults, and the one that meets none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tiny_config(str(folder), "adamw")
        self.start("whole", END)
        self.start("good", GOOD)
        self.expected = {step: state_of(folder / "whole", step) for step in (FAULTY, END)}
        self.metrics = metrics_of(folder / "whole")

    def start(
        self, name: str, step: int, fault: Fault | None = None, *, watch: bool = False
    ) -> Any:
        """Start the run `name` in a fork, up to `step`; returns how it ended and what it said."""
        run_dir = self.folder / name

        def run() -> int:
            if watch:
                Disk(run_dir / "checkpoints", fault)
            config = ["--config", str(self.folder / "config.yaml"), f"run.dir={run_dir}"]
            return pretrain.main([*config, *SETTINGS, f"train.exit_step={step}"])

        output = self.folder / f"{name}.txt"
        return forked(run, output), output.read_text()

    def points(self) -> dict[str, int]:
        """Number of points of a save in each process."""
        shutil.copytree(self.folder / "good", self.folder / "counted")
        code, said = self.start("counted", FAULTY, watch=True)
        assert code == 0, said
        place = self.folder / "counted" / "checkpoints"
        return {name: int(Path(f"{place}.{name}").read_text()) for name in ("trainer", "writer")}

    def meet(self, fault: Fault, name: str) -> dict[str, Any]:
        """Let the run `name` meet the fault, start it again, and report what became of it."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        shutil.copytree(self.folder / "good", self.folder / name)
        code, said = self.start(name, FAULTY, fault, watch=True)
        killed = -signal.SIGKILL if fault == Fault("trainer", fault.point, "kill") else None
        return {"fault": vars(fault), **self.verdict(name, code, said, killed)}

    def suffer(self, place: str, name: str) -> dict[str, Any]:
        """Start the run `name` in a bad place, then in a good one, and report what became of it."""
        good, folder = self.folder / "good", self.folder / name
        shutil.copytree(good, folder)
        used = sum(-(-path.stat().st_size // 4096) * 4 for path in good.rglob("*"))
        part = folder / "checkpoints" if place.endswith("checkpoints") else folder
        mount = PLACES[place].format(part, used * 5 // 4, good)

        def run() -> int:
            subprocess.run(mount, shell=True, check=True)
            config = ["--config", str(self.folder / "config.yaml"), f"run.dir={folder}"]
            code = pretrain.main([*config, *SETTINGS, f"train.exit_step={FAULTY}"])
            if place == "full file system":  # it is gone with this process
                shutil.copytree(folder, self.folder / f"{name} after")
            return code

        output = self.folder / f"{name}.txt"
        code = forked(lambda: run() if own_mounts() else 77, output)
        if code == 77:
            return {"place": place, "skipped": "mounts are not permitted"}
        name += " after" * (place == "full file system")
        expected = 2 if place == "read-only run folder" else 1
        return {"place": place, **self.verdict(name, code, output.read_text(), expected)}

    def verdict(self, name: str, code: int, said: str, expected: int | None) -> dict[str, Any]:
        """What a faulty start of the run `name` said, where the next continued, and what is wrong.

        `expected` is how the faulty start must end, None if it depends.
        """
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        again, continued = self.start(name, END)
        lines = [line for line in continued.splitlines() if line.startswith("continuing from ")]
        problems = []
        if "Traceback" in said + continued:
            problems.append("a traceback")
        if code not in ((0, 1) if expected is None else (expected,)):
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
        """Differences from the run that met no fault."""
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


def main(folder: Path, every: int, workers: int = 2) -> None:
    """Write report.json. Forks that many processes, each of which meets its faults."""
    runs = Runs(folder)
    counts = runs.points()
    faults = [
        Fault(process, point, action)
        for process, count in counts.items()
        for action, stride in (("kill", every), ("full disk", every * FULL_DISKS))
        for point in range(1 + every // 2, count + 1, stride)
    ]

    def meet_all(worker: int) -> int:
        met = [runs.meet(fault, f"faulty{worker}") for fault in faults[worker::workers]]
        (folder / f"met{worker}.json").write_text(json.dumps(met))
        return 0

    pids = []
    for worker in range(workers):
        pid = os.fork()
        if pid == 0:
            os._exit(meet_all(worker))
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    met = [json.loads((folder / f"met{w}.json").read_text()) for w in range(workers)]
    places = [runs.suffer(place, place) for place in PLACES]
    found = [each for some in met for each in some]
    report = {"points": counts, "faults": found, "places": places}
    (folder / "report.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
