"""Writes, reads and deletes the files of resume points, so that a point is whole or invisible."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import orjson

from orchestrator.checkpoint.files.manifest import MODEL, PARTS, PartManifest, parts_document
from orchestrator.checkpoint.files.part_file import FOLDER, FORMAT
from orchestrator.checkpoint.files.reading import PointReader
from orchestrator.checkpoint.node_local.node_storage import NodeStorage
from orchestrator.checkpoint.points import points, verify
from orchestrator.checkpoint.points.points import COMMIT, CONFIG, CURSOR, DOCUMENTS, RNG, Commit, Point
from orchestrator.checkpoint.points.run_file import RUN_FILE, read_run
from orchestrator.checkpoint.points.sealed_votes import REMOVED, VOTES, decides
from orchestrator.checkpoint.points.verify import POINTS, FileRange, QuarantineFiles, point_path
from orchestrator.errors import ResumePointError, StorageError, UnreachableNodeError
from orchestrator.json_form import encode, seal
from orchestrator.planning.state.state_layout import Layout, weights_sum
from orchestrator.records.cursor import Cursor
from orchestrator.records.points import Damage, FileEntry, Vote, damaged_point
from orchestrator.records.steps import StateKey
from orchestrator.storage.parallel import at_once


class Each(Protocol):
    """`map`, or an equivalent that uses threads."""

    def __call__(
        self, look: Callable[[FileRange], Damage | None], stretches: Sequence[FileRange], /
    ) -> Iterable[Damage | None]:
        """Calls `look` for each stretch; returns the results in order."""


class PointFiles(QuarantineFiles):
    """The resume points of one run. Every method may raise `StorageError`; then nothing was decided (rule
    16).
    """

    # ---------------------------------------------------------------------- reading
    def point_names(self, known: Collection[str] = ()) -> list[str]:
        """Returns the names of all committed points, oldest first: whole or damaged, on the lineage or not.

        The COMMIT of points in `known`, which the caller has just seen, is not requested again. A run may
        meanwhile commit a newer point and then delete an older one. The newest point is then listed: the
        folder is listed again until it has no new entry.
        """
        return self._names(self._has_commit, known)

    def names_and_foreign(self) -> tuple[list[str], tuple[str, ...]]:
        """Returns `point_names`, and those of them that are another run's (see `foreign`). One request for
        each.
        """
        if (run := read_run(self.storage)) is None:
            return self.point_names(), ()
        foreign = set[str]()

        def has_commit(name: str) -> bool:
            try:
                commit = verify.read_commit(self.storage, name)
            except verify.DamageError:
                return self._has_commit(name)
            if commit.run_id != run.id:
                foreign.add(name)
            return True

        names = self._names(has_commit)
        return names, tuple(name for name in names if name in foreign)

    def committed(self, names: Iterable[str]) -> frozenset[str]:
        """Returns those of these points whose COMMIT exists."""
        return self._committed(self._has_commit, names)

    def left_on_nodes(self) -> list[str]:
        """Like `leftovers`, for the disks of nodes that can be reached (`resume.node_folder`)."""
        if not isinstance(self.storage, NodeStorage):
            return []
        return self._without_commit(points.newest_first(self.storage.left_on_nodes())[::-1])

    def foreign(self, names: Sequence[str]) -> tuple[str, ...]:
        """Returns those of these points whose COMMIT is readable and belongs to another run."""
        if (run := read_run(self.storage)) is None:
            return ()

        def is_foreign(name: str) -> bool:
            try:
                return verify.read_commit(self.storage, name).run_id != run.id
            except verify.DamageError:
                return False

        found = at_once(self.storage, is_foreign, names)
        return tuple(name for name, is_it in zip(names, found, strict=True) if is_it)

    def is_foreign(self, name: str) -> bool:
        """Returns whether a point belongs to another run."""
        return bool(self.foreign([name]))

    def leftovers(self) -> list[str]:
        """Returns folders of uncommitted saves and of unfinished deletions, oldest first."""
        return self._without_commit(self._folders())

    def read_point(self, name: str) -> Point:
        """Reads a point's COMMIT, cursor and configuration, and verifies their digests.

        Raises `ResumePointError` naming the damaged file, and its subclass `OtherFormatError` if another
        version wrote it.
        """
        try:
            commit = self._commit(name)
            cursor = verify.decoded(name, CURSOR, Cursor, verify.read_document(self.storage, commit, CURSOR))
            config = verify.read_document(self.storage, commit, CONFIG)
        except verify.DamageError as error:
            raise damaged_point([error.damage]) from error
        return Point(name=name, commit=commit, cursor=cursor, config=config)

    def read_manifest(self, name: str) -> PartManifest:
        """Returns a point's tensors and the places of their rows. Raises `ResumePointError` naming the
        damaged file.
        """
        try:
            return verify.read_manifest(self.storage, self._commit(name))
        except verify.DamageError as error:
            raise damaged_point([error.damage]) from error

    def read_listed(self, name: str, file: str) -> bytes:
        """Returns a file of a point, with the bytes that COMMIT lists. Raises `ResumePointError`
        naming it.
        """
        try:
            return verify.read_listed(self.storage, self._commit(name), file)
        except verify.DamageError as error:
            raise damaged_point([error.damage]) from error

    def verify_point(self, name: str, fast: bool = False, each: Each | None = None) -> list[Damage]:
        """Returns the damages of a committed point; empty if it is whole.

        Computes every file's digest. `fast` reads the documents and the headers of the parts, and compares
        the sizes of the files and the sums of the headers. If a point is marked as damaged (`quarantine`),
        all its bytes are read nevertheless. Parts on unreachable nodes are left out with `fast`; without it
        they raise `UnreachableNodeError`. `each` calls a function with each stretch of the files, as `map`
        does, in any number of threads; by default as `at_once`. Files that COMMIT does not list are not read
        and never loaded. No file's content is ever executed.
        """
        fast = fast and not self.is_quarantined(name)
        return self._verify(name, each, lambda path: not fast)

    def compare_sizes(self, name: str) -> list[Damage]:
        """Returns the damages that the documents of a committed point and the sizes of its files show.

        For a point that is marked as damaged, returns the damages of the mark. Parts on unreachable nodes are
        left out.
        """
        if (mark := self.read_mark(name)) is not None:
            return [*mark.damages]
        return self._verify(name, None, lambda path: False, headers=False)

    def confirmed(self, damages: Sequence[Damage], each: Each | None = None) -> list[Damage]:
        """Returns those of another process's damages that this process finds, too.

        Compares the digests of the named files, and everything else by sizes and headers.
        """
        files: dict[str, set[str]] = {}
        for damage in damages:
            files.setdefault(damage.point, set()).add(damage.file)
        return [
            found for point, named in files.items() for found in self._verify(point, each, named.__contains__)
        ]

    def _verify(
        self, name: str, each: Each | None, with_digests: Callable[[str], bool], headers: bool = True
    ) -> list[Damage]:
        """Returns the damages of a point. Also compares the digests of the parts whose paths `with_digests`
        accepts.

        Without `headers` only the sizes of the other parts are compared.
        """
        try:
            commit = self._commit(name)
        except verify.DamageError as error:
            return [error.damage]
        at_once_here: Each = partial(at_once, self.storage)
        documents = [verify.whole(entry) for entry in commit.files if entry.path in DOCUMENTS]
        read_all = each or at_once_here
        damages = self._damages(read_all, documents, lambda one: self._check(name, one, with_digest=True))
        reader: PointReader | None = None
        if not damages:
            try:
                reader = PointReader(self.storage, verify.check_documents(self.storage, name, commit))
            except verify.DamageError as error:
                damages.append(error.damage)
        parts = [entry for entry in commit.files if entry.path not in DOCUMENTS]
        if reader is None:
            here_only = [verify.whole(e) for e in parts if not self.storage.away(point_path(name, e.path))]
            return damages + self._damages(
                read_all, here_only, lambda one: self._check(name, one, with_digest=False)
            )
        read = [entry for entry in parts if with_digests(entry.path)]
        others = [entry for entry in parts if not with_digests(entry.path)]
        looked_at = [entry for entry in others if not self.storage.away(point_path(name, entry.path))]
        damages += verify.check_sizes(self.storage, name, looked_at)
        if not headers:
            return damages
        here, wrong = reader, {damage.file for damage in damages}
        begins = [verify.whole(entry) for entry in looked_at if entry.path not in wrong]
        damages += self._damages(at_once_here, begins, lambda one: verify.check_header(name, here, one))
        damages += self._damages(
            read_all,
            verify.stretches(commit, read),
            lambda one: verify.check_part(self.storage, name, here, one),
        )
        try:
            if not damages and len(read) + len(looked_at) == len(parts):
                verify.check_sums(commit, here)
        except verify.DamageError as error:
            damages.append(error.damage)
        return damages

    def healthy_newest(
        self, names: Iterable[str], fast: bool = False, known: Sequence[Damage] = (), each: Each | None = None
    ) -> tuple[Point | None, tuple[Damage, ...]]:
        """Returns the newest healthy point of `names`, and the damages of newer ones.

        `names` are those on the lineage.

        The caller must report the damages. `known` are damages that were found before; their points are not
        read again. `fast` and `each` as in `verify_point`. Returns (None, ()) if no point is named. Raises
        `ResumePointError` if there are points and none is healthy, because training must not start from
        nothing unasked.
        """
        skipped: list[Damage] = []
        candidates = points.newest_first(names)
        for name in candidates:
            damages = [damage for damage in known if damage.point == name]
            try:
                damages = damages or self.verify_point(name, fast=fast, each=each)
            except UnreachableNodeError as error:
                raise self._with_older(error, candidates[candidates.index(name) + 1 :]) from error
            if not damages:
                return self.read_point(name), tuple(skipped)
            skipped += damages
        if candidates:
            listed = "\n".join(map(str, skipped))
            raise ResumePointError(
                f"none of the {len(candidates)} resume points of this run is healthy; "
                f"restore the files, or start a new run\n{listed}",
                code="point.none_healthy",
            )
        return None, ()

    def require_reached(self, point: Point, older: Sequence[str] | None = None) -> None:
        """Raises `UnreachableNodeError` if parts of the point are only on unreachable nodes.

        With `older` points, newest first, the error names the newest of them that can be reached.
        """
        paths = [point_path(point.name, entry.path) for entry in point.commit.files]
        try:
            for path in filter(self.storage.away, paths):
                # the node is back meanwhile; the loader of the file reports problems
                with suppress(FileNotFoundError):
                    self.storage.size(path)
        except UnreachableNodeError as error:
            raise error if older is None else self._with_older(error, older) from error

    def _with_older(self, error: UnreachableNodeError, older: Sequence[str]) -> UnreachableNodeError:
        """Builds the error for a point that cannot be reached, with the newest older one that can."""
        for name in older:
            with suppress(ResumePointError):
                files = self.read_point(name).commit.files
                if not any(self.storage.away(point_path(name, entry.path)) for entry in files):
                    return UnreachableNodeError(
                        f"{error}; the newest one that can be reached: resume.from={name}"
                    )
        return UnreachableNodeError(f"{error}; no older one can be reached either")

    # ---------------------------------------------------------------------- writing
    def commit_point(
        self,
        votes: Sequence[Vote],
        config: Mapping[str, Any],
        rng: Mapping[str, Any],
        parent: StateKey | None,
        save_s: float = 0.0,
        run_id: str = "",
        *,
        others_may: bool = False,
    ) -> Point:
        """Makes a durable resume point of a save whose files the voters have written and synced.

        `config` is the flat configuration (JSON values), `rng` the random number settings that a resume
        needs, `parent` the state that the generation continued, `save_s` the seconds since the first vote,
        `run_id` that of run.json.

        Raises `ResumePointError` if the votes do not belong together. Raises `StorageError` if a voter's file
        is not visible here as it was voted for, or the disk fails. The point may then exist or not, but if it
        does it is whole; it must not be acknowledged. `others_may`: other processes may be committing the
        same save, so that existing documents with the same content are accepted.
        """
        if reason := points.disagreement(votes):
            raise ResumePointError(
                f"the save of {votes[0].key.point_name} cannot be committed: {reason}; the save is given up",
                code="point.votes_differ",
            )
        first, name = votes[0], votes[0].key.point_name
        parts = sorted((entry for vote in votes for entry in vote.files), key=lambda entry: entry.path)
        nodes = points.nodes_of(votes)
        # otherwise ranks have made them durable, and read copies back, on disks that are not here
        if not nodes:
            self._check_visible(name, parts)
        layout, sums = _layout_of(votes), points.state_sums(votes)
        lists = next(vote for vote in votes if vote.rank == 0)
        contents = {
            CURSOR: encode(first.cursor),
            CONFIG: dict(config),
            RNG: dict(rng),
            PARTS: parts_document(layout, lists.tensors, lists.fixed),
        }
        write = self._document_there if others_may else self._write_document
        written = [write(name, file, content) for file, content in contents.items()]
        files = tuple(sorted((*parts, *written), key=lambda entry: entry.path))
        commit = Commit(
            format=FORMAT,
            key=first.key,
            parent=parent,
            world_size=first.world_size,
            optimizer_steps=first.optimizer_steps,
            weights_digest=weights_sum([sums.get(MODEL, 0)]),
            save_blocked_s=max(vote.save_blocked_s for vote in votes),
            save_s=save_s,
            files=files,
            files_digest=points.files_digest(files),
            run_id=run_id,
            state_sums={group: f"{found:032x}" for group, found in sums.items()},
            nodes=nodes,
        )
        self._sync_folders(name, written if nodes else files)
        self._create_commit(name, commit)
        return Point(name=name, commit=commit, cursor=first.cursor, config=dict(config))

    def take_point(self, other: PointFiles, point: Point, key: StateKey, run_id: str) -> Point:
        """Copies the point of another run into this one under the key `key`.

        It gets the configuration of `point`.

        Tensors and cursor keep their bytes. Their digests were verified before. Raises `StorageError` as
        `commit_point` does, and `ResumePointError` if the other point's documents are damaged meanwhile.
        """
        name, files = key.point_name, list[FileEntry]()
        reader = PointReader(self.storage, dataclasses.replace(other.read_manifest(point.name), point=name))
        for entry in point.commit.files:
            if entry.path == CONFIG:
                files.append(self._write_document(name, CONFIG, point.config))
                continue
            path = point_path(name, entry.path)
            try:
                linked = self.storage.take(other.storage, point_path(point.name, entry.path), path)
                if linked or entry.path in DOCUMENTS:
                    verify.check_file(self.storage, name, entry, with_digest=not linked)
                else:
                    verify.check_part(self.storage, name, reader, verify.whole(entry))
            except (FileNotFoundError, verify.DamageError) as error:
                raise StorageError(
                    f"{other.storage.root}/{point_path(point.name, entry.path)} changed while it was copied: "
                    f"{error}; run the command again",
                    code="storage.changed_while_read",
                ) from error
            files.append(entry)
        commit = dataclasses.replace(
            point.commit,
            key=key,
            parent=None,
            files=tuple(files),
            files_digest=points.files_digest(files),
            run_id=run_id,
            nodes=(),  # its files are here, wherever the other's are
        )
        self._sync_folders(name, commit.files)
        self._create_commit(name, commit)
        return dataclasses.replace(point, name=name, commit=commit)

    def delete_point(self, name: str) -> None:
        """Deletes a point: first COMMIT, durably, then the rest.

        A crash in between leaves a leftover, never half a point.
        """
        self.storage.delete(point_path(name, COMMIT))
        if self.storage.list(f"{POINTS}/{name}"):
            self.storage.sync(f"{POINTS}/{name}")
        self.storage.delete_folder(f"{POINTS}/{name}")
        self.lift_mark(name)

    def discard(self, name: str) -> bool:
        """Deletes the files of a save that was given up.

        Returns False if they stay, because a start is making a point of the save's votes. A committed point
        of that name stays, too.
        """
        if self._has_commit(name):
            return True
        if not decides(self.storage, name, REMOVED):
            return False
        for folder in (VOTES, FOLDER):  # the record of the decision is deleted last
            self.storage.delete_folder(point_path(name, folder))
        self.storage.delete_folder(f"{POINTS}/{name}")
        return True

    # ---------------------------------------------------------------------- inside
    def _folders(self) -> list[str]:
        return points.newest_first(self.storage.list(POINTS))[::-1]

    def _names(self, has_commit: Callable[[str], bool], known: Collection[str] = ()) -> list[str]:
        names = self._folders()
        while True:
            asked = [name for name in names if name not in known]
            there = self._committed(has_commit, asked).union(known)
            listed = self._folders()
            if set(listed) <= set(names):
                return [name for name in names if name in there]
            names = listed

    def _committed(self, has_commit: Callable[[str], bool], names: Iterable[str]) -> frozenset[str]:
        """Returns those of `names` with a COMMIT.

        From remote storage several are requested at a time. This may miss both an older point that was just
        deleted and a newer one that was committed just before. Missing ones are therefore requested again,
        one after the other, the newest last.
        """
        ordered = points.newest_first(names)[::-1]
        found = at_once(self.storage, has_commit, ordered)
        there = {name for name, is_there in zip(ordered, found, strict=True) if is_there}
        late = (name for name in ordered if name not in there and self._has_commit(name))
        return frozenset(there.union(name for name in late if has_commit(name)))

    def _has_commit(self, name: str) -> bool:
        return self.storage.exists(point_path(name, COMMIT))

    def _without_commit(self, names: Sequence[str]) -> list[str]:
        there = self.committed(names)
        return [name for name in names if name not in there]

    def _commit(self, name: str) -> Commit:
        """Returns a point's COMMIT, which must be this run's. Raises `DamageError`."""
        commit, run = verify.read_commit(self.storage, name), read_run(self.storage)
        if run is not None and commit.run_id != run.id:
            raise verify.DamageError(
                name, COMMIT, f"belongs to run {commit.run_id or 'without an id'}, {RUN_FILE} says {run.id}"
            )
        return commit

    def _create_commit(self, name: str, commit: Commit) -> None:
        if not self.storage.create(point_path(name, COMMIT), seal(points.commit_document(commit))):
            raise StorageError(
                f"{point_path(name, COMMIT)} exists already, so another process writes this attempt; end one "
                "of them",
                code="run.second_writer",
            )

    def _check(self, name: str, stretch: FileRange, with_digest: bool) -> None:
        verify.check_file(self.storage, name, stretch.entry, with_digest=with_digest)

    @staticmethod
    def _damages(
        each: Each, stretches: Sequence[FileRange], check: Callable[[FileRange], None]
    ) -> list[Damage]:
        def look(stretch: FileRange) -> Damage | None:
            try:
                check(stretch)
            except verify.DamageError as error:
                return error.damage
            return None

        return list(dict.fromkeys(damage for damage in each(look, stretches) if damage is not None))

    def _check_visible(self, name: str, parts: Sequence[FileEntry]) -> None:
        listed = {each.name: each.facts for each in self.storage.listed(point_path(name, FOLDER))}
        for entry in parts:
            facts = listed.get(entry.path.removeprefix(f"{FOLDER}/"))
            if facts is not None and facts.size == entry.bytes:
                continue  # if lists include sizes, one request covers a thousand of them
            try:
                verify.check_file(self.storage, name, entry, with_digest=False)
            except verify.DamageError as error:
                raise StorageError(
                    f"{error.damage}, as the coordinator sees it, but a rank voted for "
                    f"{entry.bytes} bytes; "
                    f"run.storage must be the same storage on every node (here {self.storage.root})",
                    code="machine.storage",
                ) from error

    def _write_document(self, name: str, file: str, content: dict[str, Any]) -> FileEntry:
        written = self.storage.write(point_path(name, file), _bytes_of(file, content))
        return dataclasses.replace(written, path=file)

    def _document_there(self, name: str, file: str, content: dict[str, Any]) -> FileEntry:
        """Writes the document unless it exists. Raises `StorageError` if a different one exists."""
        try:
            return self._write_document(name, file, content)
        except StorageError:
            data, path = _bytes_of(file, content), point_path(name, file)
            if not self.storage.exists(path):
                raise
            there = self.storage.read(path)
            if not data.startswith(there):
                raise ResumePointError(
                    f"{path} exists with other content than these votes give it, so they are not committed",
                    code="point.votes_differ",
                ) from None
            if there != data:  # torn: its writer was killed, or continues with the same bytes
                self.storage.replace(path, data)
            return dataclasses.replace(self.storage.entry(path), path=file)

    def _sync_folders(self, name: str, files: Sequence[FileEntry]) -> None:
        for folder in sorted({point_path(name, entry.path).rpartition("/")[0] for entry in files}):
            self.storage.sync(folder)


def _bytes_of(file: str, content: dict[str, Any]) -> bytes:
    """Returns the bytes of a point's document."""
    if file == PARTS:  # the only long document; indentation would double its size
        return orjson.dumps(content) + b"\n"
    assert "format" not in content, f"{file} has a field of its own where its number stands"
    return points.document({"format": FORMAT, **content})


def _layout_of(votes: Sequence[Vote]) -> Layout:
    layout = votes[0].layout
    if layout is None:
        raise ResumePointError(
            f"the save of {votes[0].key.point_name} cannot be committed: its votes name no layout; end the "
            "run, and report this",
            code="internal.vote_without_layout",
        )
    return Layout(num_shards=layout[0], num_replicas=layout[1])
