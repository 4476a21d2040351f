"""The exception tree of the package.

The class says who acts (the user, the operator, or us). The text says what is wrong, both values, and what to
do. Every class pickles, because errors cross process borders.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from orchestrator.text import visible


class OrchestratorError(Exception):
    """Base of every error that this package raises on purpose.

    `exit_code` is the exit code of a command that ends with this error. `code` names the kind of error in
    dotted lower case (`storage.no_conditional_create`), so that programs do not compare sentences. It never
    changes once it is published. A class that stands for one kind of error defines it. Every other error gets
    it where it is raised. docs/errors.md lists all codes. A library that raises our error again from its text
    alone, as torch's DataLoader does, loses the code: it is `internal.code_lost` then.
    """

    exit_code = 1
    code: str = "internal.code_lost"

    def __init__(self, text: str, *, code: str | None = None) -> None:
        super().__init__(text)
        if code is not None:
            self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, self.__dict__)

    def __str__(self) -> str:
        """The text for people. Texts and names of a run in it are `visible`."""
        return visible(super().__str__())


def _restored(
    kind: type[OrchestratorError], args: tuple[Any, ...], fields: dict[str, Any]
) -> OrchestratorError:
    """Unpickles an error without its constructor, whose arguments may differ from `args`."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class ConfigError(OrchestratorError):
    """The configuration is wrong; user changes it. The message lists every problem found, one per line."""

    exit_code = 2


class RefusedError(OrchestratorError):
    """What was asked would break a guarantee (I1 to I8); the message names both values and the way past, if
    there is one.
    """

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Refusal:
    """One reason against a start, before it is raised. `code` is its error code; `text` has both values and
    what to do.
    """

    code: str
    text: str


class BusyError(RefusedError):
    """Another launch is working on this run."""

    code = "run.busy"


class ResourceError(RefusedError):
    """The cluster, the disk or the memory is too small; the message says what is needed and what is there."""


class DataError(OrchestratorError):
    """A file or a document cannot be read as the configuration says; names file, byte offset, line and
    reason.
    """


class BadDocumentError(DataError):
    """One document is bad (invalid JSON, missing or null field, invalid UTF-8) and `data.on_bad_document` is
    `stop`. `reason_code` is the code of the reason, None where a library made the error again from its text.
    """

    code = "data.bad_document"

    def __init__(self, text: str, *, code: str | None = None, reason_code: str | None = None) -> None:
        super().__init__(text, code=code)
        self.reason_code = reason_code


class BadDocument(Exception):
    """For `data.transforms` to raise: the document that they were given is bad, its text says why, and
    `data.on_bad_document` says what becomes of it. Any other exception stops the run.
    """


class DataIdentityError(RefusedError):
    """The data or the tokenizer differ from what the run was started with."""


class FeedError(OrchestratorError):
    """The feed cannot serve a sample range; the operator looks at the journal."""


class ResumePointError(OrchestratorError):
    """A resume point is damaged or incomplete; names the point, the file and the reason."""


class OtherFormatError(ResumePointError):
    """Another version of orchestrator wrote run.json, a claim or a file of a resume point, in a format that
    is not read here: nothing is damaged, and no other point is taken in its place.
    """


class Format1Error(RefusedError, OtherFormatError):
    """The run or the resume point is of format 1, which this version does not read; user exports its weights
    with an earlier one.
    """

    code = "storage.format_1"


class LaterFormatError(OtherFormatError):
    """A later version of orchestrator wrote run.json, a claim or a file of a resume point: nothing is
    damaged. The message has its format and those that are read here; user takes the version that wrote it.
    """

    code = "storage.later_format"


class WantedPointError(RefusedError, ResumePointError):
    """The resume point that was asked for is gone, damaged or incomplete, and no other is taken in its place;
    user names another.
    """


class StorageError(OrchestratorError):
    """Storage could not be read or written, after retries; nothing was decided from it."""


class UnreachableNodeError(StorageError):
    """Files lie on the disks of nodes that cannot be reached from here; names the nodes and the files. No
    file is known to be gone or damaged.
    """

    code = "storage.unreachable_node"


class NoConditionalCreateError(RefusedError, StorageError):
    """The bucket cannot create an object only where its name is free, so two launches could claim one
    attempt; names the bucket, its server and what to use instead.
    """

    code = "storage.no_conditional_create"


class MachineError(OrchestratorError):
    """A worker's machine cannot take part in the run: its storage, packages or clock are not the run's. User
    corrects that machine; the run continues on the others.
    """


class FencedError(OrchestratorError):
    """A newer attempt of this run exists; this process may not write any more and ends."""

    code = "run.fenced"


class ElasticError(OrchestratorError):
    """The training group cannot continue (too few workers, the same step failed again and again); names the
    reason.
    """


class CoordinatorSilentError(ElasticError):
    """The coordinator does not answer, and nothing restarts it."""

    code = "launch.coordinator_silent"


class UnsavedError(ElasticError):
    """The last state of a run could not be saved in time. The reason is known to the collector of the
    votes.
    """

    code = "training.unsaved"


class TrainingError(OrchestratorError):
    """Training itself is wrong (non-finite loss, a step digest that differs from the feed's); names step and
    values.
    """


@contextmanager
def naming_fields(section: str, fields: Mapping[str, str]) -> Iterator[None]:
    """Within the block, errors of ours name the fields by which the user set what the block reads.

    For code that is written for one field and also reads another one: `fields` maps the fields that the code
    names to those that are meant. An error that names no field of `section` then gets `section` in front.
    """
    names = "|".join(map(re.escape, fields))
    try:
        yield
    except OrchestratorError as error:
        # not inside a path or a longer name
        text = re.sub(rf"(?<![\w./-])({names})(?!\w)", lambda match: fields[match[0]], str(error.args[0]))
        error.args = (text if section in text else f"{section}: {text}", *error.args[1:])
        raise


# An environment variable: the file into which a command that ends with an error of ours writes the error as
# JSON (`error_document`), for the process that started it
ERROR_FILE = "ORCHESTRATOR_ERROR_FILE"


def error_document(error: OrchestratorError) -> dict[str, str]:
    """The error as commands print it with `--json`: `class`, `code` and `text`."""
    return {"class": type(error).__name__, "code": error.code, "text": str(error)}


def report_of(error: BaseException) -> tuple[str, str, bool, str | None]:
    """An error as a worker reports it: its class, its text (the end of the traceback for one that is not
    ours), whether it is ours, and its code.
    """
    ours = isinstance(error, OrchestratorError)
    text = str(error) if ours else "".join(traceback.format_exception(error))[-4000:]
    return type(error).__name__, text, ours, code_of(error)


def code_of(error: BaseException) -> str | None:
    """The code of an error; None for one that has none, or is not ours."""
    return error.code if isinstance(error, OrchestratorError) else None


def text_of(error: BaseException) -> str:
    """An error as people read it. The text of one of ours is complete; any other is shown with its class."""
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "interrupted"
    return str(error) if isinstance(error, OrchestratorError) else visible(f"{type(error).__name__}: {error}")
