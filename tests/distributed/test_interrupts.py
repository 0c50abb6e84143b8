"""After Ctrl-C, the run saves, and resumes bit for bit. A second Ctrl-C ends the run
immediately."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.commands import torchrun
from tests.distributed.interrupt_workers import heed, launcher, main
from tests.launch import FORKS, ROOT, environment, start_forks
from tests.run_configs import tiny_config
from tests.run_results import metrics_of, same_state, state_of
from training.checkpoint.checkpoints import steps
from training.launcher import FORWARDED, Ranks
from training.lifecycle.terminal import CODE

KEYS = ["train.steps=2000", "log.interval=1", "checkpoint.interval=7"]
LINES = 5
"""Maximum number of lines that a run prints after Ctrl-C."""
TORCHRUN = [*torchrun(2), "pretrain.py"]
TORCHRUNS_OWN = re.compile(
    r"^[WE]\d{4} .*\n|^Traceback .*\n(?=.*_run_module_as_main)(?: .*\n)*\S.*\n?", re.MULTILINE
)
"""Matches warnings and tracebacks printed by torchrun itself, which its ranks cannot prevent."""


@dataclass(frozen=True)
class Started:
    """A run in progress: the process group that a terminal would signal, and its output."""

    pid: int
    output: Path
    wait: Callable[[float], int | None]

    def said(self) -> list[str]:
        """Return the lines printed so far."""
        return self.output.read_text().splitlines() if self.output.exists() else []

    def await_line(self, text: str) -> None:
        """Wait until a printed line contains `text` or the process has ended."""
        end = time.monotonic() + 600
        while not any(text in line for line in self.said()) and self.wait(0.01) is None:
            assert time.monotonic() < end, self.said()

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        os.killpg(self.pid, signal.SIGINT)


def fork(arguments: list[str], output: Path, target: Callable[..., None] = main) -> Started:
    """Start a run on one rank, or another target, in a fork of a process that has imported
    everything."""
    start_forks()
    process = FORKS.Process(target=target, args=(arguments, str(output)))
    process.start()
    assert process.pid is not None

    def wait(seconds: float) -> int | None:
        process.join(seconds)
        return process.exitcode

    return Started(process.pid, output, wait)


def command(start: list[str]) -> Callable[[list[str], Path], Started]:
    """Return a function that starts a run with a command."""

    def begin(arguments: list[str], output: Path) -> Started:
        with output.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, *start, *arguments],
                cwd=ROOT,
                env=environment(),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=heed,
            )

        def wait(seconds: float) -> int | None:
            try:
                return process.wait(seconds)
            except subprocess.TimeoutExpired:
                return None

        return Started(process.pid, output, wait)

    return begin


@pytest.fixture
def folder(folder: str) -> Path:
    """A folder with a token set and the config of a run that takes minutes."""
    tiny_config(folder)
    return Path(folder)


def arguments(folder: Path, name: str = "run", *more: str) -> list[str]:
    """Return the command-line arguments for the run FOLDER/NAME."""
    return ["--config", f"{folder}/config.yaml", *KEYS, f"run.dir={folder}/{name}", *more]


def interrupted(
    begin: Callable[[list[str], Path], Started],
    folder: Path,
    moment: float,
    codes: tuple[int, ...] = (CODE,),
) -> None:
    """Start the run, press Ctrl-C `moment` seconds after its first step (if negative, -`moment`
    seconds after the start), and check that the exit code is one of `codes`."""
    output = folder / "output.txt"
    output.unlink(missing_ok=True)
    begun = begin(arguments(folder), output)
    if moment >= 0:
        begun.await_line("| loss")
    time.sleep(abs(moment))
    begun.interrupt()
    assert begun.wait(600) in codes, begun.said()
    said = TORCHRUNS_OWN.sub("", output.read_text()) if CODE not in codes else output.read_text()
    assert "Traceback" not in said, said
    lines = said.splitlines()
    answers = [i for i, line in enumerate(lines) if line.startswith(("Ctrl-C: ", "ended by"))]
    if answers or CODE in codes:
        # Every step of these runs logs a line, with any interrupt.
        after = [line for line in lines[answers[0] :] if not line.startswith("step ")]
        assert len(after) <= LINES, after
    if moment >= 0:
        assert lines[-1].startswith("stopped by Ctrl-C after step"), lines


def goes_on_to_the_bit(folder: Path, ranks: int = 1) -> None:
    """Resume the run, and after two more steps compare it with an uninterrupted run."""
    last = steps(folder / "run")[-1] + 2
    for name in ("run", "whole"):
        line = [*arguments(folder, name), f"train.exit_step={last}"]
        begun = (
            fork(line, folder / f"{name}.txt")
            if ranks == 1
            else command(["pretrain.py"])([*line, "--ranks", str(ranks)], folder / f"{name}.txt")
        )
        assert begun.wait(600) == 0, begun.said()
    assert metrics_of(folder / "run") == metrics_of(folder / "whole")
    assert same_state(state_of(folder / "run", last), state_of(folder / "whole", last)) == []


def test_ctrl_c_at_random_moments_changes_nothing(folder):
    chance = random.Random(3)
    for _ in range(2):
        interrupted(fork, folder, chance.uniform(0, 1.0))
    goes_on_to_the_bit(folder)


def test_a_second_ctrl_c_ends_the_run_at_once(folder):
    for turn in range(9):  # on a busy machine the run may stop before the second Ctrl-C
        begun = fork(arguments(folder), folder / f"output {turn}.txt")
        begun.await_line("saved ")
        begun.interrupt()
        begun.await_line("Ctrl-C: ")
        begun.interrupt()
        assert begun.wait(600) == CODE
        if not (stopped := any(line.startswith("stopped by") for line in begun.said())):
            break
    assert not stopped
    goes_on_to_the_bit(folder)


@pytest.mark.parametrize(
    ("number", "name", "code"), [(signal.SIGINT, "Ctrl-C", CODE), (signal.SIGTERM, "SIGTERM", 143)]
)
def test_a_signal_before_training_ends_the_run_with_one_line(number, name, code, folder):
    begun = fork(arguments(folder), folder / "output.txt")
    while not begun.output.exists() and begun.wait(0.01) is None:
        pass
    os.kill(begun.pid, number)
    assert begun.wait(60) == code
    assert begun.said() == [f"ended by {name} before training began"]
    assert not (folder / "run" / "checkpoints").exists()


FORKING = """
import os, time
from training.lifecycle.terminal import Interrupts
memory = bytearray(100_000_000)
listener = Interrupts()
listener.training_begins(saves=True)
listener.listen()
for _ in range(20):
    print("| forks", flush=True)
    while not listener.requested:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    time.sleep(0.1)
    listener.requested = False
"""


def test_one_ctrl_c_while_processes_are_forked_is_not_a_second_one(tmp_path):
    begun = command(["-c", FORKING])([], tmp_path / "output.txt")
    for signals in range(1, 21):
        while begun.said().count("| forks") < signals and begun.wait(0.01) is None:
            pass
        begun.interrupt()
    assert begun.wait(60) == 0, begun.said()[-1]


RANK = """
import os, signal, sys, time
from training.lifecycle.terminal import Interrupts
listener = Interrupts()
listener.training_begins(saves=True)
terminated = []
signal.signal(signal.SIGTERM, lambda number, frame: terminated.append(number))
listener.listen()
os.write(1, f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n".encode())
while not listener.requested and not terminated:
    time.sleep(0.01)
time.sleep(float(sys.argv[1]))
os.write(1, f"rank {os.environ['RANK']} ends\\n".encode())
sys.exit(130 if listener.requested else int(sys.argv[2]))
"""
LAUNCH = (
    "import sys; from training.launcher import launch; sys.exit(launch(2, ['-c', *sys.argv[1:]]))"
)


@pytest.mark.parametrize(
    ("signals", "seconds", "code", "expected"),
    [
        ([signal.SIGINT], "0", "0", 130),
        ([signal.SIGINT, signal.SIGINT], "3600", "0", 130),  # the run would not end by itself
        ([signal.SIGTERM], "0", "0", 0),
        ([signal.SIGTERM], "0", "2", 2),
        ([signal.SIGHUP], "0", "0", 0),
        ([signal.SIGUSR1], "0", "0", 0),
        ([signal.SIGXCPU], "0", "0", 0),
    ],
    ids=["first", "second", "SIGTERM", "error", "SIGHUP", "SIGUSR1", "SIGXCPU"],
)
def test_ranks_that_pretrain_starts_are_told_of_signals_once(
    signals, seconds, code, expected, tmp_path
):
    begun = fork([RANK, seconds, code], tmp_path / "output.txt", launcher)
    begun.await_line("rank 0 of 2")
    begun.await_line("rank 1 of 2")
    for number in signals:
        os.killpg(begun.pid, number)
        if number == signal.SIGINT:
            begun.await_line("Ctrl-C: the run saves")
    assert begun.wait(300) == expected, begun.said()
    said = [line for line in begun.said() if not line.startswith("rank")]
    assert len(said) == sum(number == signal.SIGINT for number in signals), said


def test_ctrl_c_before_the_ranks_start_is_forwarded_once():
    """If two signals were forwarded, they would kill the ranks."""
    before = [signal.getsignal(number) for number in FORWARDED]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        ranks = Ranks()
        os.kill(os.getpid(), signal.SIGINT)
        with subprocess.Popen(["sleep", "60"]) as rank:
            ranks.started(SimpleNamespace(subprocess_handlers={0: SimpleNamespace(proc=rank)}))
            assert rank.wait(30) == -signal.SIGINT and not ranks.killed
    finally:
        for number, handler in zip(FORWARDED, before, strict=True):
            signal.signal(number, handler)


@pytest.mark.parametrize(("ranks", "start"), [(1, [RANK]), (2, [LAUNCH, RANK])])
def test_ctrl_c_is_heard_where_nobody_can_read_the_answer(ranks, start):
    """This happens in `python pretrain.py ... 2>&1 | tee log`, where Ctrl-C also ends tee."""
    reader, writer = os.pipe()
    variables = {"RANK": "0", "WORLD_SIZE": "1", **environment()}
    process = subprocess.Popen(
        [sys.executable, "-c", *start, "3600", "0"], cwd=ROOT, env=variables, stdout=writer,
        stderr=writer, start_new_session=True, preexec_fn=heed,
    )  # fmt: skip
    os.close(writer)
    with os.fdopen(reader) as said:
        assert len(list(islice(said, ranks))) == ranks  # all have begun
    end = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < end:
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.2)
    code = process.poll()
    process.kill()
    assert code == CODE


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux' PR_SET_PDEATHSIG")
def test_ranks_stop_when_their_launcher_was_killed(tmp_path):
    begun = fork([RANK, "0", "0"], tmp_path / "output.txt", launcher)
    begun.await_line("rank 0 of 2")
    begun.await_line("rank 1 of 2")
    os.kill(begun.pid, signal.SIGKILL)
    assert begun.wait(30) == -signal.SIGKILL
    end = time.monotonic() + 30
    while not {"rank 0 ends", "rank 1 ends"}.issubset(begun.said()):
        assert time.monotonic() < end, begun.said()
        time.sleep(0.05)


WITH_CHILDREN = """
import multiprocessing, os, time
from itertools import islice
import parallel.checkpoint.state_writer as state_writer
from types import SimpleNamespace
from torch.utils.data import DataLoader
from training.lifecycle.terminal import Interrupts
listener = Interrupts()
listener.training_begins(saves=True)
listener.listen()
def write(*_):
    os.write(1, b"| writes\\n")
    time.sleep(3600)
state_writer._written = write
writer = state_writer.PendingSave(None, None, SimpleNamespace(items=[0]))
batches = iter(DataLoader(range(10**6), num_workers=1, persistent_workers=True))
next(batches)
pid = writer._process.pid
others = [child.pid for child in multiprocessing.active_children() if child.pid != pid]
print(" ".join(map(str, ("children", pid, *others))), flush=True)
time.sleep(3600)
"""


def test_a_second_ctrl_c_ends_the_writer_and_the_workers_that_read(tmp_path):
    """Neither a single Ctrl-C nor a signal that stops the run ends the writer."""
    begun = command(["-c", WITH_CHILDREN])([], tmp_path / "output.txt")
    begun.await_line("| writes")
    begun.await_line("children")
    (line,) = [line for line in begun.said() if line.startswith("children")]
    writer, _ = pids = [int(pid) for pid in line.split()[1:]]
    begun.interrupt()
    begun.await_line("Ctrl-C: ")
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        os.kill(writer, number)
    time.sleep(0.3)
    held = running(writer)
    begun.interrupt()
    assert begun.wait(60) == CODE and held, begun.said()
    end = time.monotonic() + 30
    while any(map(running, pids)):
        assert time.monotonic() < end
        time.sleep(0.05)


def running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


MAIN = "import runpy; runpy.run_path('pretrain.py', run_name='__main__')"


@pytest.mark.parametrize(
    ("event", "text", "program", "code", "answer"),
    [
        ("import", "training.errors", MAIN, -signal.SIGINT, []),
        ("subprocess.Popen", "'RANK': '1'", LAUNCH, CODE, ["Ctrl-C: the run saves"]),
    ],
    ids=["imports", "ranks start"],
)
def test_ctrl_c_while_the_run_starts_leaves_no_traceback_and_no_rank(
    event, text, program, code, answer, tmp_path
):
    hook = f"lambda event, told: event == {event!r} and {text!r} in str(told) and os.kill(0, 2)"
    program = f"import os, sys; sys.addaudithook({hook}); {program}"
    begun = command(["-c", program])([RANK, "0", "0"], tmp_path / "output.txt")
    assert begun.wait(60) == code
    said = [line.split(" after")[0] for line in begun.said() if not line.startswith("rank")]
    assert said == answer


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ("sys.exit(2)", 2, []),
        ("os.kill(os.getpid(), 9)", 1, ["error: rank 1 was killed by SIGKILL"]),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed(ends, code, said, tmp_path):
    script = f"import os, sys, time\nif os.environ['RANK'] == '1': {ends}\ntime.sleep(60)"
    begun = fork([script], tmp_path / "output.txt", launcher)
    assert begun.wait(60) == code and begun.said() == said


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_at_random_moments_under_each_launcher(ranks, folder):
    """Test four moments with each of `python`, `--ranks` and torchrun. A single rank has no
    launcher."""
    chance = random.Random(ranks)
    starts = [["pretrain.py"]] if ranks == 1 else [["pretrain.py", "--ranks", "2"], TORCHRUN]
    for start in starts:
        for turn in range(4):
            moment = chance.uniform(-4, -1) if turn == 3 else chance.uniform(0, 3)
            # torchrun ends with 1, or by SIGINT before it handles the signal.
            codes = (1, -signal.SIGINT) if start is TORCHRUN else (CODE,)
            interrupted(command(start), folder, moment, codes)
    goes_on_to_the_bit(folder, ranks)
