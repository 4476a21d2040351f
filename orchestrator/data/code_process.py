"""Runs functions that call user code in a child process.

A command or a notebook that plans, starts or audits a run uses `call` for functions that run
`data.transforms`, a `format: python` source or a user's format. The user's modules are then imported in a
child process, never in the caller's. `trainer.dry_run.model_dry_run` does the same for `model.factory`.

`python -m orchestrator.data.code_process IN OUT` is the child. It reads the call from one pipe (inherited
file descriptors) and writes the answer into the other.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from orchestrator.errors import OrchestratorError

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig
    from orchestrator.data.spec import DataSpec
    from orchestrator.storage.files import Storage

P = ParamSpec("P")
Result = TypeVar("Result")


class CodeProcessError(OrchestratorError):
    """The process that runs the user's code ended without an answer."""

    code = "user_code.process_died"


def names_code(config: JobConfig) -> bool:
    """Whether a job's data need the user's code: transforms, a source that is Python code, or a format."""
    from orchestrator.data.common.settings import transforms_of

    formats = (source.format for source in config.data.sources)
    return any(transforms_of(config).values()) or any(map(_is_code, formats))


def reads_without_code(config: JobConfig, storage: Storage) -> bool:
    """Whether a process can read a run's data without running user code or asking a hub.

    The tokenizer must be the frozen one, or a folder with a tokenizer.json, which needs no tokenizer library.
    """
    from orchestrator.data.frozen import read_frozen

    frozen, name = read_frozen(storage), config.data.tokenizer
    if frozen is None or names_code(config):
        return False
    return name == frozen.record.tokenizer or Path(os.path.expanduser(name), "tokenizer.json").is_file()


def needs_code(spec: DataSpec) -> bool:
    """`names_code` for prepared data."""
    plans = [plan for of in spec.lists.values() for plan in of.values()]
    is_code = any(_is_code(plan.manifest.format) for plan in plans)
    return is_code or any(spec.settings.transforms.values())


def _is_code(format_: str) -> bool:
    """Whether reading files of this format runs user code."""
    from orchestrator.data.sources.formats import is_builtin

    return format_ == "python" or not is_builtin(format_)


def call(runs_code: bool, function: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
    """Calls the function: in a child process if `runs_code`, else in this one.

    In a child process, arguments and result must pickle and the function must be importable by its name.

    Raises what the function raises, and `CodeProcessError` if the process dies.
    """
    if not runs_code:
        return function(*args, **kwargs)
    calls_in, calls_out = os.pipe()
    answers_in, answers_out = os.pipe()
    # the child searches this process's path and the current directory, as Ray's workers do
    places = [*(path for path in sys.path if path), os.getcwd()]
    process = subprocess.Popen(  # noqa: S603  this Python, and this module
        [sys.executable, "-P", "-m", "orchestrator.data.code_process", str(calls_in), str(answers_out)],
        stdin=subprocess.DEVNULL,
        pass_fds=(calls_in, answers_out),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
    )
    os.close(calls_in)
    os.close(answers_out)
    calls, answers = Connection(calls_out, readable=False), Connection(answers_in, writable=False)
    try:
        answer, error = _asked(process, calls, answers, (function, args, kwargs))
    finally:
        process.kill()
        process.wait()
        calls.close()
        answers.close()
    if isinstance(error, str):
        raise CodeProcessError(f"the process that runs the user's code failed:\n{error}")
    if error is not None:
        raise error
    return answer  # type: ignore[no-any-return]


def _asked(
    process: subprocess.Popen[bytes], calls: Connection[Any, Any], answers: Connection[Any, Any], given: Any
) -> tuple[Any, OrchestratorError | str | None]:
    """Returns the function's result and its error: an error of ours, or the traceback of any other."""
    try:
        calls.send(given)
        answer, error = answers.recv()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise CodeProcessError(
            f"the process that runs the user's code ended with exit code {process.wait()} and no answer; its "
            "output is on stderr"
        ) from None
    return answer, error


def _main() -> None:
    """Runs one call in the child process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process
    with suppress(OSError):
        os.dup2(2, 1)  # what the user's code prints is no part of a command's output
    calls, answers = (Connection(int(number)) for number in sys.argv[1:3])
    function, args, kwargs = calls.recv()
    answer: tuple[Any, OrchestratorError | str | None]
    try:
        answer = function(*args, **kwargs), None
    except OrchestratorError as raised:
        answer = None, raised
    except Exception:  # noqa: BLE001  the parent raises it
        answer = None, traceback.format_exc()
    answers.send(answer)


if __name__ == "__main__":
    _main()
