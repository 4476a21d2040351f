"""Python processes that have torch and the rest imported when they begin, because they are forked from a
server that has: a worker of Ray takes 2 CPU seconds to start instead of 9.

`python -m tests.warm_python SOCKET` is the server. `launcher` writes a program that stands where Ray and the
driver look for `python`: what begins a worker, tries a model, makes an export, is a command of ours, a
notebook's kernel, or a script that says that it may be forked (`-X forked SCRIPT`, or `-X forked-with-ray
SCRIPT`), it passes on to the server, and all else to the real Python. Ray reads its environment when it is
imported: those that need it are forked from one process for each such environment. What is no worker gets the
signals of the program that passed it on, and ends when that does.
"""

from __future__ import annotations

import gc
import marshal
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MODULES = (
    # of others, which Ray imports: not once more for each of its environments
    "click",
    "fsspec.implementations.local",
    "google.protobuf.json_format",
    "google.protobuf.struct_pb2",
    "google.protobuf.timestamp_pb2",
    "jsonschema",
    "msgpack",
    "requests",
    "gigatoken",
    "orchestrator.cli.commands",
    "orchestrator.cli.tables",
    "orchestrator.coordinator.actor",
    "orchestrator.data.feed.stream_session",
    "orchestrator.data.packing.stream",
    "orchestrator.launch.api",
    "orchestrator.launch.on_ray.exports",
    "orchestrator.launch.member.remote_membership",
    "orchestrator.inspect.audit.audit",
    "orchestrator.torchrun.run",
    "orchestrator.trainer.loop",
    "orchestrator.trainer.dry_run.model_dry_run",
    "pandas",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
)
RAY_MODULES = (
    "orchestrator.coordinator.process",
    "orchestrator.data.feed.feeder",
    "orchestrator.data.feed.pipeline",
    "orchestrator.launch.on_ray.worker",
    "ray._private.workers",
    "ray.data",
    "ray.train.torch",
)
MODULES_RUN = (
    ["-P", "-m", "orchestrator.trainer.dry_run.model_dry_run"],
    ["-P", "-m", "orchestrator.launch.on_ray.exports"],
)
COMMAND, KERNEL = ["-m", "orchestrator.cli.commands"], ["-m", "ipykernel_launcher"]
SCRIPT, RAY_SCRIPT = ["-X", "forked"], ["-X", "forked-with-ray"]
PROGRAMS = (COMMAND, KERNEL, SCRIPT, RAY_SCRIPT)
ENVIRONMENTS = 6  # so many have a process with Ray to fork from
READ_LATER = {"RAY_ADDRESS"}
Settings = tuple[tuple[str, str], ...]
WORKER, SETUP = "default_worker.py", "setup_worker.py"  # the latter sets the environment for the former

# It begins some hundred times: what it imports is part of the interpreter.
LAUNCHER = f"""#!{{python}} -IS
import _signal, _socket, marshal, os, sys
words = sys.argv[1:]
program = words[:2] in {PROGRAMS}
worker = words and os.path.basename(words[0]) in {(WORKER, SETUP)}

def is_open(number):
    try:
        return bool(os.fstat(number))
    except OSError:
        return False

# a closed standard file cannot be passed on
if not program and not worker and words[:3] not in {MODULES_RUN} or not all(map(is_open, range(3))):
    os.execv({{python!r}}, [{{python!r}}, *words])
link = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
link.connect({{address!r}})
task = {{{{"words": words, "environment": dict(os.environ), "folder": os.getcwd()}}}}
files = b"".join(number.to_bytes(4, sys.byteorder) for number in range(3))
link.sendmsg([marshal.dumps(task)], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, files)])
if program and (forked := int(link.recv(8) or 0)):
    def pass_on(number, _):
        try:
            os.kill(forked, number)
        except ProcessLookupError:
            pass

    for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP):
        _signal.signal(number, pass_on)
sys.exit(int(link.recv(8) or 137))
"""


@contextmanager
def launcher(folder: Path) -> Iterator[str]:
    """A path to use as `sys.executable`; the server lives as long."""
    address, program = str(folder / "socket"), folder / "python"
    program.write_text(LAUNCHER.format(python=sys.executable, address=address))
    program.chmod(0o755)
    command = [sys.executable, "-m", "tests.warm_python", address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        yield str(program)
        server.communicate()


def serve(address: str) -> None:
    """Forks for every connection, until stdin is closed. It imports when the first one comes."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    with_ray: dict[Settings, socket.socket] = {}
    print("ready", flush=True)
    if sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        for module in MODULES:
            import_module(module)
        # transformers makes its table of renamed tensors at the first look: 0.5 s of each trial
        import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
        assert "ray" not in sys.modules
        gc.collect()
        gc.freeze()
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        link, _ = listener.accept()
        message, files = _received(link)
        task = marshal.loads(message)  # noqa: S302  from our own launcher
        if _needs_ray(task["words"]):
            settings = _settings(task["environment"])
            if settings not in with_ray:
                if len(with_ray) == ENVIRONMENTS:
                    with_ray.pop(next(iter(with_ray))).close()
                with_ray[settings], other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                if os.fork() == 0:
                    for mine in (listener, link, *with_ray.values()):
                        mine.close()
                    for file in files:
                        os.close(file)
                    _serve_with_ray(other, settings)
                other.close()
            socket.send_fds(with_ray[settings], [message], [*files, link.fileno()])
        elif os.fork() == 0:
            listener.close()
            _become(task, files, link)
        link.close()
        for file in files:
            os.close(file)


def _needs_ray(words: list[str]) -> bool:
    if words[:2] == COMMAND:
        return words[2:3] == ["train"]
    return words[:3] not in MODULES_RUN and words[:2] not in (KERNEL, SCRIPT)


def _settings(environment: dict[str, str]) -> Settings:
    """What Ray reads when it is imported."""
    names = {name for name in environment if name.startswith("RAY_")} - READ_LATER
    return tuple(sorted((name, environment[name]) for name in names))


def _received(link: socket.socket) -> tuple[bytes, list[int]]:
    message, files, _, _ = socket.recv_fds(link, 1 << 20, 4)
    return message, list(files)


def _serve_with_ray(link: socket.socket, settings: Settings) -> None:
    """In a process of its own: forks for what has these settings, until the link is closed."""
    os.environ.update(settings)
    import ray
    import ray.actor

    # Every id that Ray draws would begin the sequence from which all forks go on: two workers' tasks would
    # have the same names. Importing draws those of actor classes only.
    drawn, size = ray.actor.ActorClassID, ray.ActorClassID.size()
    ray.actor.ActorClassID = SimpleNamespace(from_random=lambda: drawn(os.urandom(size)))
    for module in RAY_MODULES:
        import_module(module)
    ray.actor.ActorClassID = drawn
    assert _drawn_in_fork() != _drawn_in_fork(), "an import has drawn an id of Ray's"
    gc.collect()
    gc.freeze()
    while (received := _received(link))[0]:
        message, (*files, asking) = received
        if os.fork() == 0:
            link.close()
            task = marshal.loads(message)  # noqa: S302  from our own launcher
            _become(task, files, socket.socket(fileno=asking))
        for file in (*files, asking):
            os.close(file)
    os._exit(0)


def _drawn_in_fork() -> bytes:
    import ray

    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, ray.NodeID.from_random().binary())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        return file.read()


def _become(task: dict[str, Any], files: list[int], link: socket.socket) -> None:
    """In the forked process: what the launcher was asked for. It learns how that ended."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.chdir(task["folder"])
        os.environ.clear()
        os.environ.update(task["environment"])
        words = task["words"]
        if words[:2] in PROGRAMS:
            _obey(words, link)
        else:
            (_run_module if words[:3] in MODULES_RUN else _work_for_ray)(words)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        link.send(str(status).encode())
        os._exit(status)


def _obey(words: list[str], link: socket.socket) -> None:
    """A command of ours, a kernel, or a script."""

    def leave() -> None:
        link.recv(1)
        os._exit(1)

    link.send(str(os.getpid()).encode())
    threading.Thread(target=leave, daemon=True).start()
    # what it starts itself begins as it has
    sys.executable = str(Path(link.getsockname()).with_name("python"))
    sys.path[0:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.argv = words[1:]
    if words[:2] == COMMAND:
        from orchestrator.cli.commands import main

        sys.argv[0] = "orchestrator"
        main(words[2:])
    elif words[:2] == KERNEL:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words[2:]
        runpy.run_path(words[2], run_name="__main__")


def _run_module(words: list[str]) -> None:
    sys.path[0:1] = os.environ["PYTHONPATH"].split(os.pathsep)
    runpy.run_module(words[2], run_name="__main__", alter_sys=True)


def _work_for_ray(words: list[str]) -> None:
    """As Ray's two programs do."""
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.utils import update_envs
    from ray._private.workers import setup_worker

    if os.path.basename(words[0]) == SETUP:
        known, words = setup_worker.parser.parse_known_args(words[1:])
        context = RuntimeEnvContext.deserialize(known.serialized_runtime_env_context or "{}")
        update_envs(context.env_vars)
        if context.command_prefix:  # a job's working directory
            change, folder, _ = context.command_prefix
            assert change == "cd", f"{context.command_prefix}: this is not known here"
            os.chdir(*shlex.split(folder))
            sys.path.insert(1, os.getcwd())
    sys.argv, sys.path[0] = words, os.path.dirname(words[0])
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1])
