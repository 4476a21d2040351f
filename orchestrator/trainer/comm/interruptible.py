"""Collectives that end when the generation ends: a gloo backend with such waits, and the abort of NCCL.

If a connection breaks in the middle of a message, gloo forgets the operation that the message belongs to. It
wakes no thread, and a waiting thread blocks until the operation's timeout (`Pair::signalException` skips
`rx_` and the unbound buffers in `tx_`; gloo in torch 2.13). Without this backend, a peer that dies while it
sends a part of the state or of a gradient would block the receiver for minutes.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.utils._python_dispatch import TorchDispatchMode

BACKEND = "interruptible"  # torch's name for `InterruptibleGloo`
GRACE_S = 1.0  # time for gloo to fail by itself after its connections were shut down, and to report which one
# The text of the error for a wait that does not end by itself
KEEPS_WAITING = "the generation is over, and gloo keeps waiting"
_CPU, _GLOO = torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO


_refused = threading.local()


@contextmanager
def refusing(error: Exception) -> Iterator[None]:
    """Within the block, collectives of this thread raise `error`.

    torch's own backends pass through its dispatcher, and those of `InterruptibleGloo` do not.
    """
    _refused.error = error
    try:
        with _Refusing(error):
            yield
    finally:
        _refused.error = None


class _Refusing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, error: Exception) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._error = error

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if function.namespace in ("c10d", "_c10d_functional"):
            raise self._error
        return function(*args, **(kwargs or {}))


class Interruptible:
    """The pending waits of one generation."""

    def __init__(self) -> None:
        self._cut: Future[None] = Future()

    def cut(self) -> None:
        """Makes all current and later waits raise soon. Can be called from any thread, and repeatedly."""
        with suppress(InvalidStateError):
            self._cut.set_result(None)

    def end_of(self, ended: Future[Any]) -> Any:
        """Waits for an operation and returns its result.

        Raises what the operation raised, and `RuntimeError` if it still runs `GRACE_S` after `cut`.
        """
        wait((ended, self._cut), return_when=FIRST_COMPLETED)
        wait((ended,), timeout=GRACE_S)
        if not ended.done():
            raise RuntimeError(KEEPS_WAITING)
        return ended.result()

    def register(self) -> None:
        """Makes the groups that torch creates for `BACKEND` from now on use these waits.

        This includes the groups that torch creates from them (`dist.new_group`).
        """

        def made(store: Store, rank: int, size: int, timeout: datetime.timedelta) -> InterruptibleGloo:
            return InterruptibleGloo(self, dist.ProcessGroupGloo(store, rank, size, timeout=timeout))

        dist.Backend.register_backend(BACKEND, made, devices=["cpu"])


class Communicator(Protocol):
    """What torch's `ProcessGroupNCCL` has."""

    def abort(self) -> None:
        """Ends all operations, also later ones, with an error."""


class Communicators:
    """The NCCL communicators of one generation.

    A collective of NCCL waits for a peer that died until its timeout. An abort stops its kernels at once, and
    the thread that waits continues.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._added: list[Communicator] = []
        self._aborted = False

    def add_group(self, group: dist.ProcessGroup) -> None:
        """Adds the communicator of a group, if the group has one for GPUs."""
        try:
            backend: Any = group._get_backend(torch.device("cuda"))
        except RuntimeError:  # the group is for CPUs alone
            return
        if hasattr(backend, "abort"):
            self.add(backend)

    def add(self, communicator: Communicator) -> None:
        """Adds a communicator. It is aborted at once if the others are."""
        with self._lock:
            self._added.append(communicator)
            if self._aborted:
                communicator.abort()

    def abort(self) -> None:
        """Aborts all. Can be called from any thread, and repeatedly."""
        with self._lock:
            if not self._aborted:
                self._aborted = True
                for communicator in self._added:
                    communicator.abort()

    def forget(self) -> None:
        """Waits for an abort that is in progress. Later ones do nothing, so the groups can be destroyed."""
        with self._lock:
            self._added.clear()


class InterruptibleGloo(dist.ProcessGroup):
    """`gloo` with waits that `waits` can end. Operations that are not named below use gloo directly."""

    def __init__(self, waits: Interruptible, gloo: dist.ProcessGroupGloo) -> None:
        super().__init__(gloo.rank(), gloo.size())  # type: ignore[call-arg]  # torch's stub lacks this one
        self._waits, self._gloo = waits, gloo
        self._set_default_backend(_GLOO)
        self._register_backend(_CPU, _GLOO, gloo)

    def begin(self, operation: str, *asked: Any) -> _Work:
        """Starts the gloo operation with this name. Raises what `refusing` was given."""
        if (error := getattr(_refused, "error", None)) is not None:
            raise error
        kind = _Lone if operation in {"send", "recv", "_reduce_scatter_base"} else _Work
        return kind(self._waits, self._gloo, getattr(self._gloo, operation)(*asked), asked)

    def getBackendName(self) -> str:
        """See torch."""
        return BACKEND

    def allreduce(self, *asked: Any) -> _Work:
        """See torch; so do those below."""
        return self.begin("allreduce", *asked)

    def broadcast(self, *asked: Any) -> _Work:  # noqa: D102
        return self.begin("broadcast", *asked)

    def allgather(self, *asked: Any) -> _Work:  # noqa: D102
        return self.begin("allgather", *asked)

    def all_gather_single(self, *asked: Any) -> _Work:  # noqa: D102
        return self.begin("_allgather_base", *asked)

    def reduce_scatter_single(self, *asked: Any) -> _Work:  # noqa: D102
        return self.begin("_reduce_scatter_base", *asked)

    def all_to_all_single(self, *asked: Any) -> _Work:  # noqa: D102
        return self.begin("alltoall_base", *asked)

    def send(self, *asked: Any) -> _Work:  # noqa: D102
        return self.begin("send", *asked)

    def recv(self, *asked: Any) -> _Work:  # noqa: D102
        return self.begin("recv", *asked)

    # as torch 2.11 calls them
    _allgather_base: Any = all_gather_single
    _reduce_scatter_base: Any = reduce_scatter_single
    alltoall_base: Any = all_to_all_single


class _Work(dist.Work):
    """An operation of `gloo`.

    An operation that is cut short runs until gloo gives it up. Until then a separate thread keeps alive what
    gloo still uses: the connections, whose destructor would block on the operation, and the memory of the
    message.
    """

    def __init__(
        self, waits: Interruptible, gloo: dist.ProcessGroupGloo, work: dist.Work, asked: Sequence[Any]
    ) -> None:
        super().__init__()
        self._waits, self._gloo, self._work, self._asked = waits, gloo, work, asked
        self._once = threading.Lock()
        self._ended: Future[Any] | None = None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """See torch. The timeout is that of the operation's group."""
        del timeout
        self._value()
        return True

    def _value(self) -> Any:
        with self._once:
            ended = self._ended = self._ended or self._awaited()
        try:
            return self._waits.end_of(ended)
        finally:
            if not ended.done():
                carried_out(partial(self._outlive, ended))

    def _awaited(self) -> Future[Any]:
        return heard(self._work.get_future())

    def _outlive(self, ended: Future[Any]) -> None:
        wait((ended,))

    def get_future(self) -> torch.futures.Future[Any]:
        """See torch."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        threading.Thread(target=self._fulfil, args=(future,), name="collective", daemon=True).start()
        return future

    def _fulfil(self, future: torch.futures.Future[Any]) -> None:
        try:
            value = self._value()
        except RuntimeError as error:
            future.set_exception(error)
        else:
            future.set_result(value)


class _Lone(_Work):
    """An operation that has no future and that only one thread may wait for."""

    def _awaited(self) -> Future[Any]:
        return carried_out(self._work.wait)


def heard(future: torch.futures.Future[Any]) -> Future[Any]:
    """Returns a future that gloo's own thread completes. One thread per operation would cost 0.2 ms
    of CPU.
    """
    ended: Future[Any] = Future()
    future.add_done_callback(lambda done: _settle(done.value, ended))
    return ended


def carried_out(work: Callable[[], Any]) -> Future[Any]:
    """Runs `work`, which waits for gloo, in a thread of its own. The future has its result or its error."""
    ended: Future[Any] = Future()
    threading.Thread(target=_settle, args=(work, ended), name="collective", daemon=True).start()
    return ended


def _settle(work: Callable[[], Any], ended: Future[Any]) -> None:
    try:
        ended.set_result(work())
    except BaseException as error:  # noqa: BLE001  the waiting thread raises it
        ended.set_exception(error)
