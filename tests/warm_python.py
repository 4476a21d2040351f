"""Python processes that have torch and the rest imported when they begin, because they are forked from a
server that has: a worker of Ray takes 2 CPU seconds to start instead of 9.

`python -m tests.warm_python SOCKET` is the server. `launcher` writes a program that stands where Ray and the
driver look for `python`: what begins a worker, or tries a model, it passes on to the server, and all else to
the real Python. Ray itself is imported in each worker, since it reads its environment then.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

MODULES = (
    "gigatoken",
    "orchestrator.coordinator.actor",
    "orchestrator.data.feed.opening",
    "orchestrator.data.packing.stream",
    "orchestrator.launch.remote_membership",
    "orchestrator.trainer.loop",
    "orchestrator.trainer.trial",
    "pandas",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
)
TRIAL = ["-P", "-m", "orchestrator.trainer.trial"]
WORKER, SETUP = "default_worker.py", "setup_worker.py"  # the latter sets the environment for the former

LAUNCHER = f"""#!{{python}} -IS
import json, os, socket, sys
words = sys.argv[1:]
if words[:3] != {TRIAL} and not os.path.basename(words[0]) in {(WORKER, SETUP)}:
    os.execv({{python!r}}, [{{python!r}}, *words])
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.connect({{address!r}})
task = {{{{"words": words, "environment": dict(os.environ), "folder": os.getcwd()}}}}
socket.send_fds(link, [json.dumps(task).encode()], [0, 1, 2])
sys.exit(int(link.recv(8) or 1))
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
    """Forks for every connection, until stdin is closed."""
    for module in MODULES:
        import_module(module)
    assert "ray" not in sys.modules
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    print("ready", flush=True)
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        link, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _become(link)
        link.close()


def _become(link: socket.socket) -> None:
    """In the forked process: what the launcher was asked for. It learns how that ended."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        given, files, _, _ = socket.recv_fds(link, 1 << 20, 3)
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        task = json.loads(given)
        os.chdir(task["folder"])
        os.environ.clear()
        os.environ.update(task["environment"])
        (_try_model if task["words"] == TRIAL else _work_for_ray)(task["words"])
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


def _try_model(words: list[str]) -> None:
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
