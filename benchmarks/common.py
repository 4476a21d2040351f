"""What the benchmarks share: a tiny model whose optimizer steps are timed where they happen, and the care of
the processes that a benchmark starts. It knows neither the scenarios nor how a run is stored.

Time: a hook of torch, called after every `optimizer.step()` in every worker, appends "label nanoseconds" to a
file of that process. The clock is CLOCK_MONOTONIC, which all processes of a machine share, so the times are
exact to about 0.1 ms; the label is the optimizer's own count of steps, which a resume restores. The same hook
times this package and plain Ray Train.
"""

from __future__ import annotations

import ctypes
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
SEQ_LEN, GLOBAL_BATCH, MICRO_BATCH, SAVE_EVERY = 128, 16, 4, 20
VOCAB_SIZE = 8192  # of the sample corpus's tokenizer
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQ_LEN,
    "tie_word_embeddings": True,
}
# A dead node is noticed after 2 to 3 s; read by Ray when a node is started.
TUNED_RAY = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_worker_niceness": "0",
}
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux
_LIMIT_S = 180.0
_AT_EACH_END_S = 10.0
_CPU_EVERY_S = 0.2
_WARM_STEPS = 40  # before the first fault: more than one save, and the pipeline runs evenly
Samples = dict[str, list[float]]
Found = TypeVar("Found")


# --------------------------------------------------------------------------------------- inside the workers
def make_model(folder: str) -> Any:
    """The model of about 0.6 M parameters (a Llama); from now on this process logs its steps in `folder`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    _log_steps(folder)
    return LlamaForCausalLM(LlamaConfig(use_cache=False, **SHAPE))


_logging: set[int] = set()


def _log_steps(folder: str) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    if os.getpid() in _logging:
        return
    _logging.add(os.getpid())
    path = os.path.join(folder, f"{os.getpid()}.steps")
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def note(optimizer: Any, *_: Any) -> None:
        now = time.monotonic_ns()
        label = int(next(iter(optimizer.state.values()))["step"])
        os.write(file, b"%d %d\n" % (label, now))

    register_optimizer_step_post_hook(note)


# ---------------------------------------------------------------------------------------- reading the times
@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A worker's optimizer step: its label, the moment it was applied (s, `time.monotonic`), who did it."""

    label: int
    time: float
    pid: int


class StepLog:
    """All steps that the workers of one scenario have made, read as they come."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._offsets: dict[Path, int] = {}
        self._steps: list[Step] = []

    def read(self) -> list[Step]:
        """All steps so far, in the order of time."""
        for path in self.folder.glob("*.steps"):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            for line in whole.splitlines():
                label, nanoseconds = line.split()
                self._steps.append(Step(label=int(label), time=int(nanoseconds) / 1e9, pid=int(path.stem)))
        self._steps.sort(key=lambda step: step.time)
        return self._steps

    def newest(self) -> int:
        """The label of the last step made; 0 before the first."""
        steps = self.read()
        return steps[-1].label if steps else 0

    def first(self, label: int, after: float) -> Step | None:
        """Who first made the step `label` after this moment."""
        return next((s for s in self.read() if s.label == label and s.time > after), None)

    def first_again(self, label: int, struck: float, beyond: int) -> Step | None:
        """The first step `label` of the group of those that survived what struck at that moment, also where
        the group before had made that label: survivors made it again. Who has steps from before and some
        beyond the label `beyond`, which only they and those that came later reached, has survived.
        """
        steps = self.read()
        before = {step.pid for step in steps if step.time < struck}
        survivors = before & {step.pid for step in steps if step.label > beyond}
        last = {s.pid: s for s in steps if s.pid in survivors and s.label == label and s.time > struck}
        return min(last.values(), key=lambda step: step.time, default=None)

    def training(self) -> list[int]:
        """The processes that made the newest step or the one before, in the order of their numbers."""
        newest = self.newest()
        return sorted({step.pid for step in self._steps[-8:] if step.label >= newest - 1})

    def step_s(self, begin: Step, num_steps: int = 10, last_label: int | None = None) -> float | None:
        """The median duration of the steps that the process of `begin` made next, up to `last_label`; None
        while there are fewer than `num_steps` of them.
        """
        own = [s for s in self.read() if s.pid == begin.pid and s.time >= begin.time]
        known = [s for s in own if last_label is None or s.label <= last_label]
        if len(known) <= num_steps and (last_label is None or len(known) < 2):
            return None
        times = [step.time for step in known[: num_steps + 1]]
        return statistics.median(b - a for a, b in zip(times, times[1:], strict=False))


# ------------------------------------------------------------------------------------------------ processes
class Command:
    """A started command; its output goes to a file. `began` is the moment before it was started."""

    def __init__(self, arguments: Sequence[str], output: Path) -> None:
        self._output = output
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("ab") as file:
            self.began = time.monotonic()
            self.process = subprocess.Popen([sys.executable, *arguments], stdout=file, stderr=file)

    def wait_for(self, look: Callable[[], Found | None], what: str, every_s: float = 0.02) -> Found:
        """What `look` finds; fails loudly if the command ends before, or nothing is found within minutes."""
        deadline = time.monotonic() + _LIMIT_S
        while time.monotonic() < deadline:
            found = look()
            if found:
                return found
            if self.process.poll() is not None:
                raise RuntimeError(f"the command ended before {what}:\n{self._tail()}")
            time.sleep(every_s)
        raise RuntimeError(f"{what}: not seen within {_LIMIT_S:.0f} s\n{self._tail()}")

    def first_step(self, log: StepLog) -> tuple[Step, float]:
        """The first step since the command was started, and the CPU seconds of all processes up to it."""
        meter, sampled = CpuMeter(), 0.0

        def look() -> Step | None:
            nonlocal sampled
            if time.monotonic() - sampled > _CPU_EVERY_S:
                sampled = time.monotonic()
                meter.sample()
            return next((step for step in log.read() if step.time > self.began), None)

        return self.wait_for(look, "the first step"), meter.sample()

    def fault_time(self, log: StepLog, workers: int = 2, later: int = 0) -> None:
        """Waits until so many workers train and the newest step lies in the middle between two saves, or
        `later` steps behind it (at most 9).
        """
        first, place = log.newest(), SAVE_EVERY // 2 + later

        def due() -> bool:
            newest = log.newest()
            ready = newest >= max(_WARM_STEPS, first + SAVE_EVERY) and newest % SAVE_EVERY == place
            return ready and len(log.training()) == workers

        self.wait_for(due, f"{workers} workers train in the middle between two saves", every_s=0.005)

    def _tail(self) -> str:
        return self._output.read_text(errors="replace")[-3000:]


@contextmanager
def owned_processes() -> Iterator[None]:
    """Within it orphaned descendants become children of this process; at its end all of them are killed."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        yield
    finally:
        kill_descendants()


def kill_descendants() -> None:
    """SIGKILLs everything that this process has started, directly or not, and waits until it is gone."""
    deadline = time.monotonic() + _AT_EACH_END_S
    while time.monotonic() < deadline:
        alive = _descendants()  # the dead too, until they are reaped: their CPU time would be counted again
        for process in alive:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        _reap()
        if not alive:
            return
        time.sleep(0.02)
    raise RuntimeError(f"processes that do not die: {[process.pid for process in alive]}")


class CpuMeter:
    """CPU seconds (user and system) of all descendants of this process; call `sample` often.

    Two sums over /proc are kept, each a lower bound: what the living have used themselves and for children
    they waited for; and what every process ever seen had used when last seen (a parent that ignores SIGCHLD
    waits for none, as a raylet does). The kernel counts in ticks of 10 ms: about 0.005 s per process are
    missing.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], float] = {}
        self._most = 0.0

    def sample(self) -> float:
        """The figure by now."""
        processes = _descendants()
        self._seen.update({(p.pid, p.started): p.own_s for p in processes})
        waited_for = sum(p.own_s + p.children_s for p in processes)
        self._most = max(self._most, waited_for, sum(self._seen.values()))
        return self._most


@dataclass(frozen=True, kw_only=True, slots=True)
class _Process:
    pid: int
    parent: int
    state: str
    started: int
    own_s: float
    children_s: float


def _descendants() -> list[_Process]:
    table = {process.pid: process for process in _processes()}
    mine, last = {os.getpid()}, 0
    while len(mine) != last:
        last = len(mine)
        mine |= {process.pid for process in table.values() if process.parent in mine}
    return [table[pid] for pid in mine if pid != os.getpid()]


def _processes() -> Iterator[_Process]:
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            text = Path("/proc", entry, "stat").read_text()
        except OSError:
            continue  # it ended meanwhile
        fields = text[text.rindex(")") + 2 :].split()
        user, system, children_user, children_system = (int(field) for field in fields[11:15])
        yield _Process(
            pid=int(entry),
            parent=int(fields[1]),
            state=fields[0],
            started=int(fields[19]),
            own_s=(user + system) / _TICKS_PER_S,
            children_s=(children_user + children_system) / _TICKS_PER_S,
        )


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


# ------------------------------------------------------------------------------------------- the work place
@contextmanager
def work_folder() -> Iterator[Path]:
    """A temporary folder, and an environment in which Ray's processes find this package and notice a node's
    death soon.
    """
    os.environ.pop("RAY_ADDRESS", None)
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT) + (os.pathsep + inherited if inherited else "")
    os.environ.update(TUNED_RAY)
    with tempfile.TemporaryDirectory(prefix="recovery-", ignore_cleanup_errors=True) as folder:
        # Ray's own files too: it notes a cluster's address there, for all clusters that share the folder
        os.environ["RAY_TMPDIR"] = folder
        yield Path(folder)


def medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each list, in 1/1000."""
    return {name: round(statistics.median(values), 3) for name, values in samples.items() if values}


def say(what: str, samples: Mapping[str, Sequence[float]]) -> None:
    """The newest values, for who waits."""
    values = ", ".join(f"{name} {values[-1]:.3f}" for name, values in samples.items() if values)
    print(f"{what}: {values}", file=sys.stderr, flush=True)
