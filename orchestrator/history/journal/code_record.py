"""Records the code of a user's functions (model, objective, optimizer), and reports what has changed since.

Files are found and read without importing them. A change is reported, not refused.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from blake3 import blake3

from orchestrator.config.schema import JobConfig
from orchestrator.errors import OrchestratorError
from orchestrator.history.journal.journal_reader import beginning_of
from orchestrator.json_form import decode
from orchestrator.storage.files import Storage

_MAX_FILES = 200  # the maximum number of modules that are followed
_MAX_ATTEMPTS = 20  # the newest attempts, whose journals are opened
_NAMED = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    """A function `package.module:name` and the files of its code.

    Paths are relative to the folder in which Python found the package. Each has the blake3 of its content.
    """

    name: str
    files: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """The code that an attempt recorded, by field. `trained_by` is for messages: "attempt 3 trained with"."""

    trained_by: str
    code: Mapping[str, Code]


def functions_of(job: JobConfig) -> dict[str, str]:
    """The fields of a configuration that name a user's function, with their values."""
    train = job.train
    named = {"model.factory": job.model.factory, "train.objective": train.objective}
    named |= {"train.objective_units": train.objective_units, "train.optimizer": train.optimizer}
    named |= {f"model.frozen.{name}.factory": model.factory for name, model in job.model.frozen.items()}
    named |= {f"train.callbacks.{number}": name for number, name in enumerate(train.callbacks)}
    return {field: path for field, path in named.items() if path is not None and ":" in path}


def code_of(job: JobConfig) -> dict[str, Code]:
    """The code of each of `functions_of` that has a source file here."""
    found = {field: Code(name=name, files=files_of(name)) for field, name in functions_of(job).items()}
    return {field: code for field, code in found.items() if code.files}


def files_of(name: str) -> dict[str, str]:
    """The files of the module of `package.module:name` and of its imports: path → digest.

    Imports are followed recursively within the same folder of `sys.path` (or the current folder). For an
    installed package, only the module's own file. Empty if there is no source file. Imports are parsed from
    the text: imports by `importlib`, and files that are read, are not found.
    """
    module = name.partition(":")[0]
    own = _source_of(module)
    if own is None:
        return {}
    root = own.parents[module.count(".") + (own.name == "__init__.py")]
    queue, files = [module], dict[str, str]()
    seen = {module}
    while queue and len(files) < _MAX_FILES:
        each = queue.pop(0)
        source = _source_of(each)
        if source is None or not source.is_relative_to(root):
            continue
        try:
            content = source.read_bytes()
        except OSError:
            continue
        files[source.relative_to(root).as_posix()] = blake3(content).hexdigest()
        if not _is_installed(root):
            imported = _imports(each, content, source.name == "__init__.py")
            new = [m for m in imported if m not in seen and not _is_ours(m)]
            seen.update(new)
            queue += new
    return dict(sorted(files.items()))


def newest_record(storage: Storage, attempts: Sequence[int]) -> Recorded | None:
    """The code recorded by the newest of these attempts that recorded any; None if none of the 20 newest did.

    Raises `StorageError`.
    """
    for number in sorted(attempts, reverse=True)[:_MAX_ATTEMPTS]:
        if code := recorded_in(beginning_of(storage, number) or {}):
            return Recorded(trained_by=f"attempt {number} trained with", code=code)
    return None


def changes(before: Recorded | None, job: JobConfig) -> list[str]:
    """How the code of `job` differs from the recorded code, as messages. Code that was not recorded counts as
    unchanged.
    """
    if before is None:
        return []
    notes = []
    for field, now in code_of(job).items():
        was = before.code.get(field)
        if was is not None and was.name == now.name and (files := _different(was.files, now.files)):
            more = f" and {len(files) - _NAMED} more" if files[_NAMED:] else ""
            notes.append(
                f"warning: the code of {field}={now.name} is not what {before.trained_by}: "
                f"{', '.join(files[:_NAMED])}{more}; the run continues with the code as it is now"
            )
    return notes


def recorded_in(fields: Mapping[str, object]) -> dict[str, Code]:
    """The code in the fields of an event `attempt`. Unreadable code counts as not recorded."""
    code = fields.get("code")
    try:
        if not isinstance(code, dict):
            return {}
        return {field: decode(Code, value, "the event `attempt`") for field, value in code.items()}
    except OrchestratorError:
        return {}


# ---------------------------------------------------------------------------------------------------- inside
def _different(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Names of files that are new, missing or changed."""
    return [
        f"{name} ({'changed' if name in before and name in now else 'new' if name in now else 'gone'})"
        for name in sorted({**before, **now})
        if before.get(name) != now.get(name)
    ]


def _source_of(module: str) -> Path | None:
    """The source file of a module, found without importing it or its packages."""
    places = [Path(place) for place in (*filter(None, sys.path), os.getcwd())]
    found: Path | None = None
    first, *inside = module.split(".")
    for number, part in enumerate((first, *inside)):
        found, below = _in_places(part, places)
        if found is None and not below and not number:
            found, below = _by_finders(part)
        if found is None and not below:
            return None
        places = below
    return found


def _in_places(part: str, places: Sequence[Path]) -> tuple[Path | None, list[Path]]:
    """The source file of a module or package in the first of these folders that has one, and the folders of
    the package's modules. A package without a file has all its folders.
    """
    spaces = []
    for place in places:
        folder = place / part
        if (package := folder / "__init__.py").is_file():
            return package.resolve(), [folder]
        if (source := place / f"{part}.py").is_file():
            return source.resolve(), []
        if folder.is_dir():
            spaces.append(folder)
    return None, spaces


def _by_finders(name: str) -> tuple[Path | None, list[Path]]:
    """Like `_in_places`, for a package that Python finds in another way, for example an editable install."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None, []
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None, []
    return Path(spec.origin).resolve(), [Path(place) for place in spec.submodule_search_locations or ()]


def _is_ours(module: str) -> bool:
    """Whether the module belongs to this package, whose version an attempt records."""
    return module.partition(".")[0] == __name__.partition(".")[0]


def _is_installed(root: Path) -> bool:
    paths = {Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "purelib", "platlib")}
    return root in paths


@lru_cache(maxsize=1024)
def _imports(module: str, content: bytes, is_package: bool) -> tuple[str, ...]:
    """The names of modules that a module's text may import, and their packages. Cached: a launch calls it
    three times.
    """
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return ()
    package = module if is_package else module.rpartition(".")[0]
    found = dict[str, None]()
    for statement in _statements(tree):
        names: list[str] = []
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            level = statement.level
            above = package.split(".")[: len(package.split(".")) - level + 1] if level else []
            base = ".".join([*above, *([statement.module] if statement.module else [])])
            names = [base, *(f"{base}.{alias.name}" for alias in statement.names)] if base else []
        for name in names:
            parts = name.split(".")
            found.update(dict.fromkeys(".".join(parts[: number + 1]) for number in range(len(parts))))
    return tuple(found)


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """All statements, including nested ones, in no order. Expressions, most of a tree, contain no import."""
    queue: list[ast.AST] = [tree]
    while queue:
        node = queue.pop()
        yield node
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            queue += getattr(node, block, ())
