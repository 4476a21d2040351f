"""`python -m benchmarks.step --json`: how fast a worker trains, beside hand-written loops on one machine.

The product is one worker without Ray, with its feed. The loops (`benchmarks.step_loops`) train the same model
with the same batch and optimizer: eager; with compiled blocks; compiled, with the loss in chunks; on a GPU
also with a larger micro-batch, and with liger-kernel where it is installed. On a CPU all processes live at
the same time and take turns of some steps, so that a busy machine slows all of them down; ratios are medians
over the turns. On a GPU they run one after the other.

`tokens_s`, `mfu` (null if the card is not known), `peak_bytes` (of tensors on the GPU, else of the process),
`first_step_s` (from the start of the process), `micro_batch_size`: of each row. `of_best`, `of_eager`: to the
fastest loop and to the eager one. `kernel_share`: the share of a turn in which some kernel ran on the GPU.
`documents_cost`: time with documents kept apart over time without, less 1. `save_slowdown_s`: what one save
adds to the steps beside it. `invariant_cost`: time under invariant numerics over time under fast ones, less
1; on a CPU both with one thread, which invariant numerics need. `memory_point_cost`: of a memory point every
10 steps, with two ranks in shards, over none, less 1. `resume_s`: from the start of a process to its first
step after a SIGKILL, by parts; `bare` is `first_step_s` of the eager loop and a read of the point's bytes.
The last line is one JSON object
{device, rows} with the product's values; null could not be measured here.

`--size` chooses the model (default: `mini` on a CPU, `1b` on a GPU), `--only` parts of the table, and
`--set` further fields of the product's job (`--set train.compile=blocks`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT
from benchmarks.step_loops import GPU_LOOPS, LOOPS, SIZES, Size
from benchmarks.step_turns import ADDRESS, GPU, KEY

PARTS = ("speed", "documents", "invariant", "saves", "memory", "resume")
_LIMIT_S = 900.0
_Row = dict[str, Any]


class Ended(Exception):
    """A process ended instead of making steps."""


class Worker:
    """A process that makes steps on request."""

    def __init__(
        self, arguments: Sequence[str], folder: Path, name: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name, self._log = name, folder / f"{name.replace(' ', '-').replace(',', '')}.log"
        address = str(folder / f"{os.urandom(4).hex()}.socket")
        self.marks: dict[str, float] = {}
        self.began = time.time()
        with Listener(address, authkey=KEY) as listener, self._log.open("ab") as log:
            path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
            self.process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                env={**os.environ, "PYTHONPATH": path, ADDRESS: address, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            self._connection = self._accepted(listener)
        self.first_step_s = 0.0

    def _accepted(self, listener: Listener) -> Any:
        listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
        while True:
            try:
                return listener.accept()
            except TimeoutError:
                if self.process.poll() is not None:
                    raise self._ended() from None

    def _ended(self) -> Ended:
        tail = self._log.read_text(errors="replace")[-2000:]
        return Ended(f"{self.name} ended with {self.process.wait()}:\n{tail}")

    def first_step(self) -> None:
        """Waits for the first step."""
        self.first_step_s = self._answer()["at"] - self.began

    def request(self, steps: int, profile: bool = False) -> None:
        """Lets it make steps."""
        self._connection.send({"steps": steps, "profile": profile})

    def turn(self, steps: int, profile: bool = False) -> _Row:
        """Lets it make steps, and returns what they took."""
        self.request(steps, profile)
        return self._answer()

    def answer(self) -> _Row:
        """Waits for the end of the steps that were requested."""
        return self._answer()

    def kill(self) -> None:
        """Ends it and all its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _answer(self) -> _Row:
        while True:
            try:
                if not self._connection.poll(_LIMIT_S):
                    raise Ended(f"{self.name} made no step in {_LIMIT_S:.0f} s")
                answer: _Row = self._connection.recv()
            except (EOFError, OSError) as error:
                raise self._ended() from error
            if "mark" not in answer:
                return answer
            self.marks.setdefault(answer["mark"], answer["at"])


class Bench:
    """The processes of one run of the benchmark, with their files in `folder`."""

    def __init__(self, folder: Path, size: Size, changes: Sequence[str], turn_steps: int, turns: int) -> None:
        self.folder, self._size, self._changes = folder, size, list(changes)
        self._turn_steps, self._turns = turn_steps, turns
        corpus = [sys.executable, "-m", "orchestrator.cli.entry", "sample-corpus", str(folder / "corpus")]
        subprocess.run(corpus, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)

    def loop(self, name: str) -> Worker:
        """Starts a hand-written loop."""
        size = json.dumps(vars(self._size))
        return Worker(["benchmarks.step_loops", size, name], self.folder, name)

    def product(
        self, name: str, changes: Sequence[str] = (), world: int = 1, threads: int | None = None
    ) -> list[Worker]:
        """Starts the ranks of a run of the product. `threads`: of torch, on the CPU."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        ranks = []
        for rank in range(world):
            path, environment = self.written(name, rank, world, port)
            if threads is not None:
                environment["OMP_NUM_THREADS"] = str(threads)
            arguments = ["benchmarks.step_product", str(path), *self._changes, *changes]
            ranks.append(Worker(arguments, self.folder, f"{name}-{rank}", environment))
        return ranks

    def written(self, name: str, rank: int, world: int, port: int = 0) -> tuple[Path, dict[str, str]]:
        """Writes the job of a run; returns its path, and the environment of a rank. `port` 0: a free one."""
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(self._job(name)))
        if not port:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
        return path, {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }

    def points(self, name: str) -> list[Path]:
        """Returns the folders of the resume points of a run."""
        return [commit.parent for commit in (self.folder / "runs" / name).rglob("COMMIT")]

    def _job(self, name: str) -> dict[str, Any]:
        size = self._size
        return {
            "run": {"name": name, "storage": str(self.folder / "runs")},
            "data": {
                "sources": [
                    {"name": "text", "path": str(self.folder / "corpus" / "*.jsonl"), "format": "jsonl"}
                ],
                "tokenizer": str(self.folder / "corpus" / "tokenizer"),
                "num_tokenizers": 1,
                "num_epochs": 64,
            },
            "pack": {"seq_len": size.seq_len},
            "model": {"config": size.model},
            "train": {
                "global_batch_size": size.samples,
                "micro_batch_size": size.micro_batch_size,
                "max_steps": 1_000_000,
                "lr": 3e-4,
                "precision": "bf16" if GPU else "float32",
                "numerics": "fast",
            },
            "cluster": {"num_workers": 1, "use_gpu": GPU},
            "resume": {"every_steps": None, "every_minutes": None, "keep_latest": 1},
            "monitor": {"tensorboard": False},
        }

    # ------------------------------------------------------------------------------------------- the table
    def speed(self) -> list[_Row]:
        """Returns the rows of the table, the product's first."""
        names = ["product", *LOOPS, *(GPU_LOOPS if GPU else ())]
        turns = self._all_at_once(names) if not GPU else self._one_by_one(names)
        best = max((name for name in turns if name != "product"), key=lambda name: _speed(turns[name]))
        rows = [self._row(name, turns[name], turns.get("eager"), turns[best]) for name in turns]
        _say(f"the fastest loop: {best}")
        return rows

    def _all_at_once(self, names: Sequence[str]) -> dict[str, list[_Row]]:
        turns: dict[str, list[_Row]] = {}
        with ExitStack() as ends:
            workers = {}
            for name in names:  # one after the other, so that the first steps are timed alone
                worker = self._start(name)
                ends.callback(worker.kill)
                worker.first_step()
                worker.turn(self._turn_steps)
                workers[name] = worker
            for number in range(self._turns):
                in_turn = list(workers.items())
                for name, worker in in_turn[:: 1 if number % 2 else -1]:
                    found = worker.turn(self._turn_steps)
                    turns.setdefault(name, []).append({**found, "first_step_s": worker.first_step_s})
        return {name: turns[name] for name in names}

    def _one_by_one(self, names: Sequence[str]) -> dict[str, list[_Row]]:
        turns: dict[str, list[_Row]] = {}
        for name in names:
            try:
                worker = self._start(name)
            except Ended as error:  # liger is not installed
                _say(f"left out: {error}")
                continue
            try:
                worker.first_step()
                worker.turn(self._turn_steps)
                found = [worker.turn(self._turn_steps) for _ in range(self._turns)]
                found.append({**worker.turn(self._turn_steps, profile=True), "is_profiled": True})
                turns[name] = [{**each, "first_step_s": worker.first_step_s} for each in found]
                _say(f"{name}: {self._tokens(_seconds(turns[name])):.0f} tokens/s")
            except Ended as error:  # the larger micro-batch does not fit
                if name == "product":
                    raise
                _say(f"left out: {error}")
            finally:
                worker.kill()
        return turns

    def _start(self, name: str) -> Worker:
        return self.product("product")[0] if name == "product" else self.loop(name)

    def _row(self, name: str, own: list[_Row], eager: list[_Row] | None, best: list[_Row]) -> _Row:
        tokens_s = self._tokens(_seconds(own))
        whole = "whole batch" in name
        profiled = [row for row in own if row.get("is_profiled") and row["kernel_s"]]
        return {
            "loop": name,
            "tokens_s": round(tokens_s),
            "mfu": self._mfu(tokens_s),
            "of_best": _ratio(own, best),
            "of_eager": None if eager is None else _ratio(own, eager),
            "kernel_share": round(profiled[0]["kernel_s"] / profiled[0]["seconds"], 4) if profiled else None,
            "peak_bytes": max(row["peak_bytes"] for row in own),
            "micro_batch_size": self._size.samples if whole else self._size.micro_batch_size,
            "first_step_s": round(own[0]["first_step_s"], 2),
        }

    def _tokens(self, seconds: float) -> float:
        return self._size.samples * self._size.seq_len * self._turn_steps / seconds

    def _mfu(self, tokens_s: float) -> float | None:
        if not GPU:
            return None
        from orchestrator.trainer.model.model_flops import peak_flops

        peak, size = peak_flops(torch.cuda.get_device_name(), "bf16"), self._size
        kv = size.hidden * size.kv_heads // size.heads
        block = 2 * size.hidden * (size.hidden + kv) + 3 * size.hidden * size.inner
        parameters = size.layers * block + 2 * size.vocabulary * size.hidden
        flops = 6 * parameters + 12 * size.layers * size.hidden * size.seq_len
        return None if peak is None else round(tokens_s * flops / peak, 4)

    # ---------------------------------------------------------------------------------------- other figures
    def documents(self) -> dict[str, Any]:
        """Returns `documents_cost`."""
        whole, apart = self._alternately(
            ("plain", ()), ("documents", ("pack.document_attention=true",))
        )
        return {"documents_cost": _cost(apart, whole)}

    def invariant(self) -> dict[str, Any]:
        """Returns `invariant_cost`."""
        precision = () if not GPU else ("train.precision=float32",)
        fast, invariant = self._alternately(
            ("fast", precision), ("invariant", ("train.numerics=invariant", *precision)), threads=1
        )
        return {"invariant_cost": _cost(invariant, fast)}

    def memory(self) -> dict[str, Any]:
        """Returns `memory_point_cost`; null where two ranks do not find a device each."""
        if GPU and torch.cuda.device_count() < 2:
            return {"memory_point_cost": None}
        shard = ("train.parallel=shard",)
        without, copied = self._alternately(
            ("without", (*shard, "resume.memory_every_steps=null")),
            ("copied", (*shard, "resume.memory_every_steps=10")),
            world=2,
            steps=10,
        )
        return {"memory_point_cost": _cost(copied, without)}

    def saves(self) -> dict[str, Any]:
        """Returns `save_slowdown_s`: turns with a save, to the turns before and behind."""
        with self._running(("saved", ()), world=1) as (worker,):
            slower = []
            before = worker.turn(self._turn_steps)["seconds"]
            for _ in range(self._turns):
                os.kill(worker.process.pid, signal.SIGUSR1)
                saving = worker.turn(self._turn_steps)["seconds"]
                worker.turn(self._turn_steps)  # the end of the save, if it takes longer than a turn
                after = worker.turn(self._turn_steps)["seconds"]
                slower.append(saving - (before + after) / 2)
                before = after
            saved = bool(self.points("saved"))
        return {"save_slowdown_s": round(statistics.median(slower), 3) if saved else None}

    def resume(self) -> dict[str, Any]:
        """Returns `resume_s`: a start after a SIGKILL."""
        with self._running(("resumed", ()), world=1) as (worker,):
            os.kill(worker.process.pid, signal.SIGUSR1)
            for _ in range(100):
                worker.turn(self._turn_steps)
                if self.points("resumed"):
                    break
        (point, *_) = self.points("resumed")
        num_bytes = sum(file.stat().st_size for file in point.rglob("*") if file.is_file())
        with self._running(("resumed", ()), world=1, warm=False) as (worker,):
            total, marks, began = worker.first_step_s, worker.marks, worker.began
        loop = self.loop("eager")
        try:
            loop.first_step()
        finally:
            loop.kill()
        parts, last = {}, began
        for name in ("imports", "configuration and data", "build", "group", "load"):
            parts[name.replace(" ", "_")], last = round(marks[name] - last, 2), marks[name]
        parts["first_step"] = round(began + total - last, 2)
        read_s = _read_seconds(point)
        return {
            "resume_s": {
                "total": round(total, 2),
                **parts,
                "bare": round(loop.first_step_s + read_s, 2),
                "point_bytes": num_bytes,
            }
        }

    def _alternately(
        self,
        *runs: tuple[str, Sequence[str]],
        world: int = 1,
        steps: int | None = None,
        threads: int | None = None,
    ) -> list[list[_Row]]:
        """Returns the turns of each of the runs, which take turns."""
        found: list[list[_Row]] = [[] for _ in runs]
        with ExitStack() as ends:
            groups = [ends.enter_context(self._running(run, world, threads=threads)) for run in runs]
            for _ in range(self._turns):
                for turns, ranks in zip(found, groups, strict=True):
                    turns.append(_joint_turn(ranks, steps or self._turn_steps))
        return found

    @contextmanager
    def _running(
        self, run: tuple[str, Sequence[str]], world: int, warm: bool = True, threads: int | None = None
    ) -> Iterator[list[Worker]]:
        """Runs the product until the end of the block, from its first steps on."""
        ranks = self.product(*run, world=world, threads=threads)
        try:
            for rank in ranks:
                rank.first_step()
            if warm:
                _joint_turn(ranks, self._turn_steps)
            yield ranks
        finally:
            for rank in ranks:
                rank.kill()


def _joint_turn(ranks: Sequence[Worker], steps: int) -> _Row:
    for rank in ranks:
        rank.request(steps)
    answers = [rank.answer() for rank in ranks]
    return max(answers, key=lambda answer: float(answer["seconds"]))


def _read_seconds(point: Path) -> float:
    """Returns how long a plain read of the files takes, with whatever the page cache holds of them."""
    began = time.perf_counter()
    for file in point.rglob("*"):
        if file.is_file():
            with file.open("rb", buffering=0) as opened:
                while opened.read(8 << 20):
                    pass
    return time.perf_counter() - began


def _seconds(turns: Sequence[_Row]) -> float:
    return statistics.median(turn["seconds"] for turn in turns if not turn.get("is_profiled"))


def _speed(turns: Sequence[_Row]) -> float:
    return 1 / _seconds(turns)


def _ratio(own: Sequence[_Row], other: Sequence[_Row]) -> float:
    """The speed of `own` to `other`: a median over turns that were made beside each other."""
    if GPU:
        return round(_seconds(other) / _seconds(own), 4)
    pairs = zip(other, own, strict=True)
    return round(statistics.median(theirs["seconds"] / mine["seconds"] for theirs, mine in pairs), 4)


def _cost(own: Sequence[_Row], other: Sequence[_Row]) -> float:
    pairs = zip(own, other, strict=True)
    return round(statistics.median(mine["seconds"] / theirs["seconds"] for mine, theirs in pairs) - 1, 4)


def device_name() -> str:
    """Returns what the figures were measured on."""
    if GPU:
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"cpu, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(
    size: Size, parts: Sequence[str], changes: Sequence[str], turn_steps: int, turns: int
) -> dict[str, Any]:
    """Returns the JSON object that is printed."""
    found: dict[str, Any] = {"device": device_name()}
    names = ("tokens_s", "mfu", "of_best", "of_eager", "kernel_share", "peak_bytes", "micro_batch_size")
    found.update(dict.fromkeys((*names, "first_step_s", "documents_cost", "save_slowdown_s")))
    found.update(invariant_cost=None, memory_point_cost=None, resume_s=None, rows=[])
    with tempfile.TemporaryDirectory(prefix="step-") as folder:
        bench = Bench(Path(folder), size, changes, turn_steps, turns)
        if "speed" in parts:
            rows = bench.speed()
            found.update({name: value for name, value in rows[0].items() if name != "loop"}, rows=rows)
        for name in PARTS[1:]:
            if name in parts:
                figures = getattr(bench, name)()
                _say(json.dumps(figures))
                found.update(figures)
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print only the JSON object, in one line")
    parser.add_argument("--size", choices=SIZES, default="1b" if GPU else "mini")
    parser.add_argument("--only", default=",".join(PARTS), metavar="PARTS", help="of: %(default)s")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="changes")
    parser.add_argument("--steps", type=int, default=6, help="of a turn")
    parser.add_argument("--turns", type=int, default=3 if GPU else 8)
    options = parser.parse_args()
    parts = options.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    found = measure(SIZES[options.size], parts, options.changes, options.steps, options.turns)
    if not options.json:
        for row in found["rows"]:
            print(json.dumps(row))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
