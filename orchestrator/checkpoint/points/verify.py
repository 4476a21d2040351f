"""Verifies a point's files against what was committed, and marks damaged points.

This is the only module that decides what is damage. Only surely absent files and wrong bytes are damage.
Storage that cannot be read raises `StorageError`. Nothing it reads is ever executed. `ReadingProgress`
reports how far a long reading is: bytes done and total, at most every few seconds.

    quarantine/00000480-a0003-g0007.json   sealed; Mark. Created exclusively, deleted when it is lifted

Nothing of a marked point is deleted or moved. A mark records the result of the newest reading of all bytes.
`verify`, `points`, a start and the run's own verification make it, and lift it if they find every byte right.
Wherever bytes can decide, the mark does not: every command that chooses a point (a start, `plan`, `rewind`,
`fork`, `export`) reads all bytes of a marked one. All of them thus agree, also after its files were restored.
Commands that only display points (`status`, the page) and retention use the mark. A mark that is late or lost
thus costs a check, and never a point.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from blake3 import blake3

from orchestrator.checkpoint.files.manifest import (
    MODEL,
    PARTS,
    PartDamage,
    PartManifest,
    manifest_of,
    require_known,
)
from orchestrator.checkpoint.files.part_file import FORMAT, part_path
from orchestrator.checkpoint.files.reading import PointReader
from orchestrator.checkpoint.points import points
from orchestrator.checkpoint.points.points import (
    COMMIT,
    CONFIG,
    CURSOR,
    DOCUMENTS,
    RNG,
    Commit,
    parse_point_name,
)
from orchestrator.errors import LaterFormatError, OrchestratorError, StorageError
from orchestrator.history.claims.claim_files import now_text
from orchestrator.json_form import LaterSealError, SealError, decode, encode, seal, unseal
from orchestrator.planning.state.state_layout import weights_sum
from orchestrator.records.cursor import Cursor
from orchestrator.records.points import Damage, FileEntry
from orchestrator.storage.files import Storage
from orchestrator.storage.parallel import at_once, hashed_at_once

Kind = TypeVar("Kind")

POINTS = "points"
STRETCH_BYTES = 256 << 20


class DamageError(Exception):
    """Carries a damage to the place where it is reported."""

    def __init__(self, point: str, file: str, reason: str) -> None:
        self.damage = Damage(point=point, file=file, reason=reason)
        super().__init__(str(self.damage))


def point_path(name: str, file: str) -> str:
    """Returns the path of a point's file, relative to the run."""
    return f"{POINTS}/{name}/{file}"


def read_commit(storage: Storage, name: str) -> Commit:
    """Returns the content of a point's COMMIT, after checking its consistency.

    Raises `DamageError`, and `OtherFormatError` if another version wrote it.
    """
    assert points.parse_point_name(name) is not None, f"{name!r} is no point's name"

    def damage(reason: str) -> DamageError:
        return DamageError(name, COMMIT, reason)

    try:
        content = unseal(storage.read(point_path(name, COMMIT)))
    except FileNotFoundError as error:
        gone = name not in storage.list(POINTS)
        raise damage("is missing, with the point's whole folder" if gone else "is missing") from error
    except LaterSealError as error:
        raise LaterFormatError(f"resume point {name}: {COMMIT} {error}") from error
    except SealError as error:
        raise damage(str(error)) from error
    if isinstance(content, dict):
        require_known(content.get("format"), f"resume point {name}")
    commit = decoded(name, COMMIT, Commit, content)
    if commit.key.point_name != name:
        raise damage(f"is that of point {commit.key.point_name}")
    if points.files_digest(commit.files) != commit.files_digest:
        raise damage("lists other files than its digest of the list says")
    paths = [entry.path for entry in commit.files]
    if len(set(paths)) != len(paths) or {*paths} != {*DOCUMENTS} | _parts_of(commit):
        raise damage("lists files that cannot be those of a point")
    if weights_sum([_sum_of(commit)]) != commit.weights_digest:
        raise damage(f"has the weights digest {commit.weights_digest} and the sums {commit.state_sums}")
    return commit


def _parts_of(commit: Commit) -> set[str]:
    """Returns the tensor files that a COMMIT must list."""
    if commit.world_size != len(commit.files) - len(DOCUMENTS):
        return set()
    return {part_path(rank, commit.world_size) for rank in range(commit.world_size)}


def _sum_of(commit: Commit) -> int:
    """Returns the sum of the model's rows; -1, which no digest has, if it is not a number."""
    try:
        return int(commit.state_sums.get(MODEL, "0"), 16)
    except ValueError:
        return -1


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRange:
    """A part of a file that is checked by itself: the pieces that begin in [start, start + bytes).

    For a document it is the whole file.
    """

    entry: FileEntry
    start: int
    bytes: int


def whole(entry: FileEntry) -> FileRange:
    """Returns the range of a whole file."""
    return FileRange(entry=entry, start=0, bytes=entry.bytes)


def stretches(commit: Commit, parts: Sequence[FileEntry]) -> list[FileRange]:
    """Splits these tensor files of the point, so that several threads can work on one file."""
    return [
        FileRange(entry=entry, start=start, bytes=min(STRETCH_BYTES, entry.bytes - start))
        for entry in parts
        for start in range(0, max(1, entry.bytes), STRETCH_BYTES)
    ]


def check_part(storage: Storage, name: str, reader: PointReader, stretch: FileRange) -> None:
    """Raises `DamageError` unless the bytes of a tensor file are as committed."""
    try:
        reader.check(stretch.entry.path, stretch.start, stretch.start + stretch.bytes)
    except PartDamage as error:
        raise DamageError(name, error.file, error.reason) from error


def check_header(name: str, reader: PointReader, part: FileRange) -> None:
    """Raises `DamageError` unless the header of a tensor file is as committed."""
    try:
        reader.extents(part.entry.path)
    except PartDamage as error:
        raise DamageError(name, error.file, error.reason) from error


def check_sums(commit: Commit, reader: PointReader) -> None:
    """Raises `DamageError` if the sums in COMMIT are not those of its parts, which is a writer's error."""
    name = commit.key.point_name
    try:
        found = {group: f"{total:032x}" for group, total in reader.sums().items()}
    except PartDamage as error:
        raise DamageError(name, error.file, error.reason) from error
    if found != commit.state_sums:
        raise DamageError(name, COMMIT, f"has the sums {commit.state_sums}, those of its parts are {found}")


def check_file(storage: Storage, name: str, entry: FileEntry, with_digest: bool) -> None:
    """Raises `DamageError` unless the file has the committed size and, with `with_digest`, the digest.

    The digest is that of all its bytes; not to be used for parts.
    """
    while (reason := _wrong_with(storage, point_path(name, entry.path), entry, with_digest)) is not None:
        if not storage.elsewhere(point_path(name, entry.path)):
            raise DamageError(name, entry.path, reason)


def _wrong_with(storage: Storage, path: str, entry: FileEntry, with_digest: bool) -> str | None:
    try:
        found_bytes = storage.size(path)
        found = storage.entry(path) if with_digest and found_bytes == entry.bytes else None
    except FileNotFoundError:
        return "is missing"
    if found_bytes != entry.bytes:
        return f"has {found_bytes} bytes, committed were {entry.bytes}"
    if found is not None and found.digest != entry.digest:
        return f"has digest {found.digest}, committed was {entry.digest}"
    return None


def check_sizes(storage: Storage, name: str, entries: Sequence[FileEntry]) -> list[Damage]:
    """Returns which of a point's files are missing or have another size. Raises `StorageError`.

    If lists include sizes (`Traits`), this takes one list request for each folder.
    """
    sizes: dict[str, int] = {}
    if storage.traits.lists_facts:
        for folder in sorted({entry.path.rpartition("/")[0] for entry in entries}):
            for found in storage.listed(point_path(name, folder).rstrip("/")):
                if found.facts is not None:
                    sizes[f"{folder}/{found.name}".lstrip("/")] = found.facts.size
    damages = []
    for entry in entries:
        if sizes.get(entry.path) == entry.bytes:
            continue
        try:
            check_file(storage, name, entry, with_digest=False)
        except DamageError as error:
            damages.append(error.damage)
    return damages


def read_document(storage: Storage, commit: Commit, file: str) -> dict[str, Any]:
    """Returns the JSON object of a point's document, after verifying its digest.

    The format number, which older documents lack, is removed (except from parts.json). Raises `DamageError`,
    and `OtherFormatError` if another version wrote it.
    """
    name = commit.key.point_name
    try:
        found = orjson.loads(read_listed(storage, commit, file))
    except orjson.JSONDecodeError as error:
        raise DamageError(name, file, f"is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise DamageError(name, file, "is JSON, but no object")
    written = found.get("format") if file == PARTS else found.pop("format", FORMAT)
    require_known(written, f"resume point {name}: {file}")
    if file != PARTS and written != FORMAT:
        raise DamageError(name, file, f"has format {written!r}, which is no number of one")
    return found


def read_listed(storage: Storage, commit: Commit, file: str) -> bytes:
    """Returns a file of a point, which must be listed in COMMIT with its size and digest. Raises
    `DamageError`.
    """
    name = commit.key.point_name
    entry = next((entry for entry in commit.files if entry.path == file), None)
    if entry is None:
        raise DamageError(name, file, "is not listed in COMMIT")
    try:
        data = storage.read(point_path(name, file))
    except FileNotFoundError as error:
        raise DamageError(name, file, "is missing") from error
    digest = blake3(data).hexdigest()
    if (len(data), digest) != (entry.bytes, entry.digest):
        committed = f"{entry.bytes} with digest {entry.digest}"
        raise DamageError(
            name, file, f"has {len(data)} bytes with digest {digest}, committed were {committed}"
        )
    return data


def read_manifest(storage: Storage, commit: Commit) -> PartManifest:
    """Returns a point's tensors. Raises `DamageError`."""
    name = commit.key.point_name
    try:
        return manifest_of(name, commit.files, read_document(storage, commit, PARTS))
    except PartDamage as error:
        raise DamageError(name, error.file, error.reason) from error


def check_documents(storage: Storage, name: str, commit: Commit) -> PartManifest:
    """Returns the point's manifest. Raises `DamageError` if the documents do not fit together.

    Each document is as committed, so that this is a writer's error.
    """
    decoded(name, CURSOR, Cursor, read_document(storage, commit, CURSOR))
    for file in (CONFIG, RNG):
        read_document(storage, commit, file)
    return read_manifest(storage, commit)


def decoded(name: str, file: str, kind: type[Kind], content: Any) -> Kind:
    """Returns `content` as a record of `kind`. Raises `DamageError`."""
    try:
        return decode(kind, content, file)
    except OrchestratorError as error:
        raise DamageError(name, file, f"is not as this version writes it: {error}") from error


SAY_EVERY_S = 5.0
THREADS_FROM_BYTES = 16 << 20  # hashing fewer bytes takes less time than starting threads
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"))


class ReadingProgress:
    """Calls `say` with a line when a reading has taken `SAY_EVERY_S`, and then at most that often.

    Safe to use from threads.
    """

    def __init__(
        self, say: Callable[[str], None], what: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`what` names what is read, for the line."""
        self._say, self._what, self._clock = say, what, clock
        self._lock = threading.Lock()
        self._done, self._total = 0, 0
        self._said_at = clock()

    def expect(self, num_bytes: int) -> None:
        """Adds bytes that are to be read."""
        with self._lock:
            self._total += num_bytes

    def read(self, num_bytes: int) -> None:
        """Adds bytes that were read and compared."""
        with self._lock:
            self._done += num_bytes
            now = self._clock()
            if now - self._said_at < SAY_EVERY_S or self._done >= self._total:
                return
            self._said_at = now
            line = f"{self._what}: {read_of(self._done, self._total)} read"
        self._say(line)


def read_of(done: int, total: int) -> str:
    """Formats the bytes that were read and the total, for people."""
    size, unit = next((each for each in _UNITS if total >= each[0]), (1 << 10, "KiB"))
    return f"{done / size:,.1f} of {total / size:,.1f} {unit}"


class ReadAtOnce:
    """`each` of `PointFiles.verify_point`: reads stretches in threads and reports the progress."""

    def __init__(self, storage: Storage, say: Callable[[str], None], what: str) -> None:
        self._storage, self._progress = storage, ReadingProgress(say, what)

    def __call__(
        self, look: Callable[[FileRange], Damage | None], stretches: Sequence[FileRange], /
    ) -> Iterable[Damage | None]:
        """Yields what `look` returns, in the order of the stretches."""

        def read(stretch: FileRange) -> Damage | None:
            found = look(stretch)
            self._progress.read(stretch.bytes)
            return found

        num_bytes = sum(stretch.bytes for stretch in stretches)
        self._progress.expect(num_bytes)
        in_threads = hashed_at_once if num_bytes >= THREADS_FROM_BYTES else at_once
        return in_threads(self._storage, read, stretches)


# ------------------------------------------------------------------------------------------------------ marks
QUARANTINE = "quarantine"
_MARK_NAME = re.compile(r"(.+)\.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """What was found wrong with a point, by whom and when (ISO 8601). The latter two are for people."""

    point: str
    damages: tuple[Damage, ...]
    by: str
    created: str


class QuarantineFiles:
    """The marks of one run. Every method may raise `StorageError`."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def quarantined(self) -> frozenset[str]:
        """Returns the points with a mark, including deleted ones."""
        matches = (match for match in map(_MARK_NAME.fullmatch, self.storage.list(QUARANTINE)) if match)
        return frozenset(match[1] for match in matches if parse_point_name(match[1]))

    def is_quarantined(self, point: str) -> bool:
        """Whether a point has a mark."""
        return self.storage.exists(_mark_path(point))

    def read_mark(self, point: str) -> Mark | None:
        """Returns the mark on a point, or None. A file that is not as it was written counts as a mark."""
        path = _mark_path(point)
        try:
            found = decode(Mark, unseal(self.storage.read(path)), path)
            if found.point != point or not found.damages:
                raise SealError(f"it is that of {found.point}, with {len(found.damages)} damages")
        except FileNotFoundError:
            return None
        except OrchestratorError as error:
            if isinstance(error, StorageError):
                raise
            unreadable = Damage(point=point, file=path, reason=f"is not as it was written: {error}")
            return Mark(point=point, damages=(unreadable,), by="", created="")
        return found

    def note_reading(self, point: str, damages: Sequence[Damage], by: str) -> bool:
        """Makes or lifts the mark after all bytes of a point were read.

        Returns whether that changed anything. `damages` are the result of reading. An existing mark is not
        changed, because it records since when there is damage. A point without COMMIT does not exist, and
        gets no mark.
        """
        if damages:
            if not self.storage.exists(point_path(point, COMMIT)):
                return False
            mark = Mark(point=point, damages=tuple(damages), by=by, created=now_text())
            return self.storage.create(_mark_path(point), seal(encode(mark)))
        if not self.storage.exists(_mark_path(point)):
            return False
        self.lift_mark(point)
        return True

    def lift_mark(self, point: str) -> None:
        """Removes a mark, if there is one."""
        self.storage.delete(_mark_path(point))
        if self.storage.list(QUARANTINE):
            self.storage.sync(QUARANTINE)


def _mark_path(point: str) -> str:
    return f"{QUARANTINE}/{point}.json"
