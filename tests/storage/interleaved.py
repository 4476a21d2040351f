"""Several programs on one model disk, and every order in which their calls to it can come.

For each order the programs begin anew on the same disk, and each is held before every call that another one
could notice. Two orders after which the disk has the same files, as long, and each program has seen the same,
are followed as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from orchestrator.storage.disk import Disk
from orchestrator.storage.local_store import TEMPORARY
from tests.storage.crashfs import Files, ModelDisk
from tests.storage.stepped import Stepped

# of what is read, sizes too, `open` stands for all, as one moment; a handle is written under its file's name
CALLS = ("create", "write", "link", "unlink", "open", "list")
Act = Callable[[Disk], Any]


class _Program(Stepped):
    """A program, and the disk that it sees."""

    def __init__(self, act: Act, disk: ModelDisk, shared: Callable[[str], bool]) -> None:
        super().__init__()
        self._disk, self._shared = disk, shared
        self._paths: dict[int, str] = {}  # by handle
        self.seen: list[object] = []
        self.start(lambda: act(self))  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._disk, name)
        return (lambda *given: self._held(name, call, given)) if name in CALLS else call

    def _held(self, name: str, call: Callable[..., Any], given: Sequence[Any]) -> Any:
        path = self._paths[given[0]] if name == "write" else given[-1]
        if TEMPORARY not in path and self._shared(path):
            self.hold()
        try:
            found = call(*given)
        except OSError as error:
            self.seen.append((name, path, type(error)))
            raise
        if name == "create":
            self._paths[found] = path
        if TEMPORARY not in path:
            self.seen.append((name, path, tuple(_lasting(found)) if name == "list" else None))
        return found


def interleavings(
    files: Files, programs: Sequence[Act], shared: Callable[[str], bool]
) -> Iterator[tuple[ModelDisk, list[Any]]]:
    """The disk and what the programs returned, for each way in which they can come to their end on `files`.
    `shared`: the paths at which one of them can notice another. A program must not raise.
    """
    todo: list[tuple[int, ...]] = [()]
    known: set[object] = set()
    while todo:
        order = list(todo.pop())
        disk = ModelDisk.of(files)
        running = [_Program(act, disk, shared) for act in programs]
        try:
            for number in order:
                running[number].step()
            while ready := [number for number, program in enumerate(running) if not program.is_done]:
                sizes = {path: len(data or b"") for path, data in disk.files().items()}
                there = tuple((path, sizes[path]) for path in _lasting(sizes))
                state = (there, *(tuple(program.seen) for program in running))
                if state in known:
                    break
                known.add(state)
                todo += [(*order, number) for number in ready[1:]]
                order.append(ready[0])
                running[ready[0]].step()
            else:
                yield disk, [program.result for program in running]
        finally:
            for program in running:
                program.stop()


def _lasting(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if TEMPORARY not in name)
