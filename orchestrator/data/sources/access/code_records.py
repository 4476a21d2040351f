"""The records of a source that is Python code, as one virtual file.

Its folder is `python://`, its name `package.module:function`. It has records and no bytes. The format
`python` turns records into documents.
"""

from __future__ import annotations

import io
import operator
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, Self

from orchestrator.data.common.user_code import load, shown
from orchestrator.errors import ConfigError, DataError

# joined with the name, it is the path of the file
BASE = "python://"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Opened:
    """The object that a factory returned, its number of records, and the identity of the object and its
    code.
    """

    records: Any
    num_records: int
    identity: str


_lock = threading.Lock()
_opened: dict[str, _Opened] = {}


class CodeRecords:
    """An `InputFile` of records: `size` is their number, `etag` the identity of the records and their
    code.
    """

    mtime_ns = 0

    def __init__(self, name: str) -> None:
        """Calls the factory, once per process.

        Raises `ConfigError` if it cannot be called, or returns an object without indexing or a length.
        """
        self.name = name
        with _lock:
            if name not in _opened:
                _opened[name] = _open(name)
            opened = _opened[name]
        self.size, self.etag, self._records = opened.num_records, opened.identity, opened.records

    @classmethod
    def anew(cls, name: str) -> Self:
        """The same, with a new call of the factory, which may return other records by now."""
        with _lock:
            _opened.pop(name, None)
        return cls(name)

    def record(self, index: int) -> Any:
        """The record. Raises `DataError` with the place and the traceback if the user's code fails."""
        try:
            return self._records[index]
        except (Exception, SystemExit) as error:  # user code may raise anything; no bad record
            raise DataError(
                f"{self.name}[{index}]: its __getitem__ failed; fix the code (changed code has another "
                f"identity, see resume.accept_changed):\n{shown(error)}",
                code="user_code.raised",
            ) from error

    def several(self, indices: range) -> list[Any]:
        """The records of `indices`.

        Uses one call if the user's object has `__getitems__`, the protocol of torch and of `datasets`. Raises
        as `record`, with the place of the record that fails if one fails by itself.
        """
        ask = getattr(self._records, "__getitems__", None)
        if not callable(ask):
            return [self.record(index) for index in indices]
        where = f"{self.name}[{indices.start}:{indices.stop}]"
        try:
            found = ask(list(indices))
        except (Exception, SystemExit) as error:  # see `record`
            for index in indices:
                self.record(index)
            raise DataError(
                f"{where}: its __getitems__ failed, but __getitem__ returns each of these records; fix the "
                f"code (changed code has another identity, see resume.accept_changed):\n{shown(error)}",
                code="user_code.raised",
            ) from error
        if not isinstance(found, list | tuple) or len(found) != len(indices):
            what = f"{len(found)} records" if isinstance(found, list | tuple) else f"a {type(found).__name__}"
            raise DataError(
                f"{where}: its __getitems__ returned {what} for {len(indices)} indices; return a list with "
                "one record for each index, in their order, or remove the method",
                code="user_code.wrong_result",
            )
        return list(found)

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        """Raises: the file has no bytes."""
        self._no_bytes()

    def stream(self) -> io.BufferedIOBase:
        """Raises: the file has no bytes."""
        self._no_bytes()

    def _no_bytes(self) -> NoReturn:
        raise AssertionError(f"{self.name} has records and no bytes")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


def _open(name: str) -> _Opened:
    where = f"data.sources[].path={name}"
    code = load(name, where)
    try:
        records = code.function()
        num_records = operator.index(len(records))
        fingerprint = getattr(records, "fingerprint", None)
        known_by = fingerprint() if callable(fingerprint) else None
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        raise ConfigError(
            f"{where}: a call without arguments failed, or the returned object has no length, or its "
            f"fingerprint() failed:\n{shown(error)}",
            code="user_code.raised",
        ) from error
    if not hasattr(records, "__getitem__") or isinstance(records, str | bytes):
        raise ConfigError(
            f"{where}: it returned {type(records).__name__}; return an object with __len__ and "
            "__getitem__(i), such as a list of mappings",
            code="user_code.wrong_result",
        )
    identity = f"{num_records} records, {code.identity}"
    if known_by is not None:
        identity += f", fingerprint {known_by}"
    return _Opened(records=records, num_records=num_records, identity=identity)
