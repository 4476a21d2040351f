"""The files of resume points: committing, reading, verifying and deleting them so that a point is whole or
invisible.

It knows files and digests; which points are on the lineage, and when one may be committed or deleted, it is
told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import orjson
from blake3 import blake3

from orchestrator.errors import OrchestratorError, ResumePointError, StorageError
from orchestrator.records import Cursor, FileEntry, StateKey, TensorEntry, Vote, decode, encode
from orchestrator.resume import points
from orchestrator.resume.points import (
    COMMIT,
    CONFIG,
    CURSOR,
    DOCUMENTS,
    FORMAT,
    PARTS,
    RNG,
    Commit,
    Damage,
    Point,
)
from orchestrator.resume.sealed import SealError, seal, unseal
from orchestrator.storage import Storage

Kind = TypeVar("Kind")

POINTS = "points"


class _DamageError(Exception):
    """Carries a damage from where it is found to where it is reported."""

    def __init__(self, damage: Damage) -> None:
        super().__init__(str(damage))
        self.damage = damage


class PointFiles:
    """Resume points of one run. Every method may raise `StorageError`; then nothing was decided (rule 16)."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    # ------------------------------------------------------------------------------------------------------------ reading
    def point_names(self) -> list[str]:
        """The names of all committed points, oldest first, whether they are whole or not, on the lineage or
        not.
        """
        names = points.newest_first(self.storage.list(POINTS))[::-1]
        return [name for name in names if self.storage.exists(_path(name, COMMIT))]

    def leftovers(self) -> list[str]:
        """Folders of saves that were never committed, or whose deletion did not end, oldest first."""
        names = points.newest_first(self.storage.list(POINTS))[::-1]
        return [name for name in names if not self.storage.exists(_path(name, COMMIT))]

    def read_point(self, name: str) -> Point:
        """A point's COMMIT, cursor and configuration, their digests checked. Raises `ResumePointError` naming
        the damaged file.
        """
        try:
            commit = self._read_commit(name)
            cursor = _decoded(name, CURSOR, Cursor, self._read_document(commit, CURSOR))
            config = self._read_document(commit, CONFIG)
        except _DamageError as error:
            raise _point_error(error.damage) from error
        return Point(name=name, commit=commit, cursor=cursor, config=config)

    def read_parts(self, name: str) -> tuple[TensorEntry, ...]:
        """A point's tensors: where each chunk lies, with its digest. Raises `ResumePointError` naming the
        damaged file.
        """
        try:
            return self._read_parts(self._read_commit(name))
        except _DamageError as error:
            raise _point_error(error.damage) from error

    def verify_point(self, name: str, fast: bool = False) -> list[Damage]:
        """What is wrong with a committed point; empty if it is whole.

        Every file's digest is computed; `fast` reads only the documents and compares the sizes of the others.
        A file that COMMIT does not list belongs to no point: it is not looked at and never loaded. No file's
        content is ever executed.
        """
        try:
            commit = self._read_commit(name)
        except _DamageError as error:
            return [error.damage]
        damages = []
        for entry in commit.files:
            try:
                self._check(name, entry, with_digest=not fast or entry.path in DOCUMENTS)
            except _DamageError as error:
                damages.append(error.damage)
        try:
            return damages or self._verify_documents(name, commit)
        except _DamageError as error:
            return [error.damage]

    def healthy_newest(self, names: Iterable[str]) -> tuple[Point | None, tuple[Damage, ...]]:
        """The newest of the named points (those on the lineage) whose every digest is right, and the damages
        of those passed over.

        The caller must tell the damages aloud. (None, ()) if no point is named. Raises `ResumePointError` if
        there are points and none is healthy: training from nothing is then not a thing to do unasked.
        """
        skipped: list[Damage] = []
        candidates = points.newest_first(names)
        for name in candidates:
            damages = self.verify_point(name)
            if not damages:
                return self.read_point(name), tuple(skipped)
            skipped += damages
        if candidates:
            listed = "\n".join(map(str, skipped))
            raise ResumePointError(
                f"none of the {len(candidates)} resume points of this run is healthy; restore the files, or start a new run\n{listed}"
            )
        return None, ()

    # ------------------------------------------------------------------------------------------------------------ writing
    def commit_point(
        self,
        votes: Sequence[Vote],
        config: Mapping[str, Any],
        rng: Mapping[str, Any],
        parent: StateKey | None,
        save_s: float = 0.0,
    ) -> Point:
        """Make a save, whose files the voters have written and synced, a resume point. Returns when it is
        durable.

        `config` is the flat configuration (JSON values), `rng` what a resume needs to know of random numbers,
        `parent` the state that the generation continued, `save_s` seconds since the first vote. Raises
        `ResumePointError` if the votes do not belong together, `StorageError` if a voter's file is not seen
        here as it was voted for, or the disk fails: then the point may exist or not, but if it does it is
        whole; it must not be acknowledged.
        """
        if reason := points.disagreement(votes):
            raise ResumePointError(
                f"the save of {votes[0].key.point_name} cannot be committed: {reason}; the save is given up"
            )
        first, name = votes[0], votes[0].key.point_name
        parts = sorted((entry for vote in votes for entry in vote.files), key=lambda entry: entry.path)
        self._check_visible(name, parts)
        tensors = points.merge_tensors(votes)
        contents = {
            CURSOR: encode(first.cursor),
            CONFIG: dict(config),
            RNG: dict(rng),
            PARTS: {"format": FORMAT, "tensors": encode(tensors)},
        }
        written = [self._write_document(name, file, content) for file, content in contents.items()]
        files = tuple(sorted((*parts, *written), key=lambda entry: entry.path))
        commit = Commit(
            format=FORMAT,
            key=first.key,
            parent=parent,
            world_size=first.world_size,
            optimizer_steps=first.optimizer_steps,
            weights_digest=points.weights_digest(tensors),
            save_blocked_s=max(vote.save_blocked_s for vote in votes),
            save_s=save_s,
            files=files,
            files_digest=points.files_digest(files),
        )
        self._sync_folders(name, files)
        if not self.storage.create(_path(name, COMMIT), seal(encode(commit))):
            raise StorageError(
                f"{_path(name, COMMIT)} exists already, so another process writes this attempt; end one of them"
            )
        return Point(name=name, commit=commit, cursor=first.cursor, config=dict(config))

    def delete_point(self, name: str) -> None:
        """Delete a point: first COMMIT, durably, then the rest. A crash in between leaves a leftover, never
        half a point.
        """
        self.storage.delete(_path(name, COMMIT))
        if self.storage.list(f"{POINTS}/{name}"):
            self.storage.sync(f"{POINTS}/{name}")
        self.storage.delete_folder(f"{POINTS}/{name}")

    def discard(self, name: str) -> None:
        """Delete the files of a save that was given up; a committed point of that name stays."""
        if not self.storage.exists(_path(name, COMMIT)):
            self.storage.delete_folder(f"{POINTS}/{name}")

    # ------------------------------------------------------------------------------------------------------------ inside
    def _check_visible(self, name: str, parts: Sequence[FileEntry]) -> None:
        for entry in parts:
            try:
                self._check(name, entry, with_digest=False)
            except _DamageError as error:
                raise StorageError(
                    f"{error.damage}, as the coordinator sees it, but a rank voted that it wrote {entry.bytes} bytes; "
                    f"run.storage must be the same storage on every node (here {self.storage.root})"
                ) from error

    def _write_document(self, name: str, file: str, content: Any) -> FileEntry:
        data = points.document(content)
        self.storage.write(_path(name, file), data)
        return FileEntry(path=file, bytes=len(data), digest=blake3(data).hexdigest())

    def _sync_folders(self, name: str, files: Sequence[FileEntry]) -> None:
        for folder in sorted({_path(name, entry.path).rpartition("/")[0] for entry in files}):
            self.storage.sync(folder)

    def _read_commit(self, name: str) -> Commit:
        assert points.parse_point_name(name) is not None, f"{name!r} is no point's name"

        def damage(reason: str) -> _DamageError:
            return _DamageError(Damage(point=name, file=COMMIT, reason=reason))

        try:
            content = unseal(self.storage.read(_path(name, COMMIT)))
        except FileNotFoundError as error:
            raise damage("is missing") from error
        except SealError as error:
            raise damage(str(error)) from error
        if isinstance(content, dict) and content.get("format") != FORMAT:
            raise ResumePointError(
                f"resume point {name} has format {content.get('format')}, this version reads {FORMAT}; use the version that wrote it"
            )
        commit = _decoded(name, COMMIT, Commit, content)
        if commit.key.point_name != name:
            raise damage(f"is that of point {commit.key.point_name}")
        if points.files_digest(commit.files) != commit.files_digest:
            raise damage("lists other files than its digest of the list says")
        paths = [entry.path for entry in commit.files]
        if (
            len(set(paths)) != len(paths)
            or not all(points.is_part_path(p) or p in DOCUMENTS for p in paths)
            or {*DOCUMENTS} - {*paths}
        ):
            raise damage("lists files that cannot be those of a point")
        return commit

    def _check(self, name: str, entry: FileEntry, with_digest: bool) -> None:
        """Raise `_DamageError` unless the file has the committed size and, if asked for, digest."""
        path = _path(name, entry.path)
        try:
            found_bytes = self.storage.size(path)
            found = self.storage.entry(path) if with_digest and found_bytes == entry.bytes else None
        except FileNotFoundError as error:
            raise _DamageError(Damage(point=name, file=entry.path, reason="is missing")) from error
        if found_bytes != entry.bytes:
            raise _DamageError(
                Damage(
                    point=name,
                    file=entry.path,
                    reason=f"has {found_bytes} bytes, committed were {entry.bytes}",
                )
            )
        if found is not None and found.digest != entry.digest:
            reason = f"has digest {found.digest}, committed was {entry.digest}"
            raise _DamageError(Damage(point=name, file=entry.path, reason=reason))

    def _read_document(self, commit: Commit, file: str) -> Any:
        name = commit.key.point_name
        entry = next(entry for entry in commit.files if entry.path == file)
        try:
            data = self.storage.read(_path(name, file))
        except FileNotFoundError as error:
            raise _DamageError(Damage(point=name, file=file, reason="is missing")) from error
        digest = blake3(data).hexdigest()
        if (len(data), digest) != (entry.bytes, entry.digest):
            reason = f"has {len(data)} bytes with digest {digest}, committed were {entry.bytes} with {entry.digest}"
            raise _DamageError(Damage(point=name, file=file, reason=reason))
        return orjson.loads(data)

    def _read_parts(self, commit: Commit) -> tuple[TensorEntry, ...]:
        content = self._read_document(commit, PARTS)
        return tuple(
            _decoded(commit.key.point_name, PARTS, TensorEntry, tensor) for tensor in content["tensors"]
        )

    def _verify_documents(self, name: str, commit: Commit) -> list[Damage]:
        """What does not fit together although every file is as committed: a writer's mistake."""
        _decoded(name, CURSOR, Cursor, self._read_document(commit, CURSOR))
        tensors = self._read_parts(commit)
        elsewhere = {chunk.file for tensor in tensors for chunk in tensor.chunks} - {
            entry.path for entry in commit.files
        }
        if elsewhere:
            return [
                Damage(
                    point=name, file=PARTS, reason=f"names {sorted(elsewhere)}, which COMMIT does not list"
                )
            ]
        found = points.weights_digest(tensors)
        if found != commit.weights_digest:
            return [
                Damage(
                    point=name,
                    file=PARTS,
                    reason=f"gives weights digest {found}, committed was {commit.weights_digest}",
                )
            ]
        return []


def _decoded(name: str, file: str, kind: type[Kind], content: Any) -> Kind:
    try:
        return decode(kind, content, file)
    except OrchestratorError as error:
        raise _DamageError(
            Damage(point=name, file=file, reason=f"is not as this version writes it: {error}")
        ) from error


def _point_error(damage: Damage) -> ResumePointError:
    return ResumePointError(
        f"{damage}; restore the file, or resume from another point (`orchestrator points` lists them)"
    )


def _path(name: str, file: str) -> str:
    return f"{POINTS}/{name}/{file}"
