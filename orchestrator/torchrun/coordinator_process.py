"""The coordinator of a group under torchrun, in a child process of rank 0.

Training on rank 0 cannot starve it, and signals to the whole job do not end it. It reads a pipe of which
rank 0 holds the other end. Once that is closed it ends with the run: rank 0's connection ends too, which ends
a run that is not over (`LaunchMachine`, `fixed`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from orchestrator.coordinator.coordinator_start import CoordinatorStart
from orchestrator.coordinator.process import CoordinatorProcess
from orchestrator.errors import ElasticError
from orchestrator.launch.process.safe_output import let_go, output_never_waits, show_faults_as_data
from orchestrator.torchrun.transport import CallServer, new_key, open_listener

ORPHANED_S = 60.0  # how long the process may need to end the run when rank 0 is gone
END_S = 5.0  # how long rank 0 waits for the process to end
MEMBER_GONE = "its process ended"
_LOOK_S = 0.05
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class HostedCoordinator:
    """Rank 0's side: starts the process, and ends it with the run.

    `port` and `key` are what a rank needs to connect.
    """

    def __init__(self, start: CoordinatorStart) -> None:
        """Starts the process. Connections are accepted from now on, and served once it has begun."""
        self.key = new_key()
        with open_listener() as listener:
            self.port: int = listener.getsockname()[1]
            theirs, ours = os.pipe()
            try:
                self._process = _started(theirs, listener.fileno())
            except OSError as error:
                os.close(ours)
                raise ElasticError(
                    f"the coordinator's process could not be started: {error.strerror or error}; see the "
                    "limits of processes and open files here, and whether memory runs out",
                    code="launch.coordinator_not_started",
                ) from error
            finally:
                os.close(theirs)
        self._pipe = Connection(ours, readable=False)
        with suppress(OSError):  # a process that has died shows at the first call
            self._pipe.send((start, self.key))

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def close(self, limit_s: float = END_S) -> None:
        """Lets the process end when the run is over, and waits up to `limit_s` for that."""
        self._pipe.close()
        with suppress(subprocess.TimeoutExpired):  # it still answers other ranks, and ends by itself
            self._process.wait(limit_s)


def _started(pipe: int, listener: int) -> subprocess.Popen[bytes]:
    # it imports what this process can import, and from the current folder
    places = [*(path for path in sys.path if path), os.getcwd()]
    program = [sys.executable, "-P", "-m", "orchestrator.torchrun.coordinator_process"]
    # signals wait until the process has its own handlers
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        return subprocess.Popen(  # noqa: S603  this Python, and this module
            [*program, str(pipe), str(listener)],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            pass_fds=(pipe, listener),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
            start_new_session=True,  # Ctrl-C is for the ranks, which save once more
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def _serve(pipe: Connection[Any, Any], listener: socket.socket) -> None:
    """Serves until rank 0 has closed its end of the pipe and the run has ended."""
    start, key = pipe.recv()
    # no member is looked for: the end of its connection shows that it is gone
    coordinator = CoordinatorProcess(start, why_dead=lambda info: None)  # noqa: ARG005

    async def answer(method: str, arguments: tuple[Any, ...]) -> Any:
        assert not method.startswith("_"), method
        return await getattr(coordinator, method)(*arguments)

    async def ended(name: str) -> None:
        await coordinator.died(name, MEMBER_GONE)

    server = CallServer(key, answer, ended)
    serving = asyncio.create_task(server.serve(listener))
    loop = asyncio.get_running_loop()
    rank_zero_ended = loop.create_future()

    def note_end() -> None:
        loop.remove_reader(pipe.fileno())
        rank_zero_ended.set_result(None)

    loop.add_reader(pipe.fileno(), note_end)
    await asyncio.wait([serving, rank_zero_ended], return_when=asyncio.FIRST_COMPLETED)
    deadline = time.monotonic() + ORPHANED_S
    while not serving.done() and time.monotonic() < deadline:
        is_over = coordinator.has_ended or not coordinator.was_called
        if is_over and not server.members:
            break
        await asyncio.sleep(_LOOK_S)
    if serving.done():
        serving.result()  # raises why it has ended
    serving.cancel()


def _main() -> None:
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)  # not ignored: processes that it starts receive them
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    pipe, listener = Connection(int(sys.argv[1]), writable=False), socket.socket(fileno=int(sys.argv[2]))
    show_faults_as_data()
    code = 0
    with output_never_waits():
        try:
            asyncio.run(_serve(pipe, listener))
        except EOFError:
            pass  # rank 0 has died at once
        except Exception:  # noqa: BLE001  the end of its connections shows it to the ranks
            traceback.print_exc()
            code = 1
        let_go(sys.stderr)
    os._exit(code)  # at once, even if a thread waits for storage


if __name__ == "__main__":
    _main()
