"""What a resume point consists of, as values: its names, its documents, the digest of its weights, and what
can be wrong with it.

It reads and writes no storage; `store` does, with these.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import orjson
from blake3 import blake3

from orchestrator.json_form import encode
from orchestrator.records import Cursor, FileEntry, StateKey, TensorEntry, Vote
from orchestrator.storage.sealed import canonical

FORMAT = 1  # of a point's documents
COMMIT, CURSOR, CONFIG, RNG, PARTS = "COMMIT", "cursor.json", "config.json", "rng.json", "parts.json"
DOCUMENTS = (CURSOR, CONFIG, RNG, PARTS)
_NAME = re.compile(r"(\d{8,})-a(\d{4,})-g(\d{4,})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """A file of a point that is surely absent or has other bytes than were committed."""

    point: str
    file: str
    reason: str

    def __str__(self) -> str:
        return f"resume point {self.point}: {self.file} {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """The content of COMMIT. `parent` is what the generation that saved the point continued, `world_size` its
    size.

    `run_id` is run.json's. `save_blocked_s` is the longest time that a rank could not train because of the
    save; `save_s` is from the first vote to COMMIT. `files_digest` is the blake3 of the canonical JSON of
    `files`, `weights_digest` that of `weights_digest()`.
    """

    format: int
    key: StateKey
    parent: StateKey | None
    world_size: int
    optimizer_steps: int
    weights_digest: str
    save_blocked_s: float
    save_s: float
    files: tuple[FileEntry, ...]
    files_digest: str
    run_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A committed resume point without its tensors. `config` is the flat configuration (dotted path → JSON
    value) it was made with.
    """

    name: str
    commit: Commit
    cursor: Cursor
    config: dict[str, Any]

    @property
    def key(self) -> StateKey:
        """The state that it holds."""
        return self.commit.key

    @property
    def num_bytes(self) -> int:
        """Size of all its files but COMMIT."""
        return sum(entry.bytes for entry in self.commit.files)


def parse_point_name(name: str) -> StateKey | None:
    """The key of a point's name, None if it is no such name (each key has exactly one)."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    step, attempt, generation = map(int, match.groups())
    key = StateKey(attempt=attempt, generation=generation, step=step)
    return key if key.point_name == name else None


def newest_first(names: Iterable[str]) -> list[str]:
    """Point names ordered by (attempt, generation, step), newest first; what is no point name is left out."""
    keys = (parse_point_name(name) for name in names)
    return [key.point_name for key in sorted({key for key in keys if key is not None}, reverse=True)]


def files_digest(files: Sequence[FileEntry]) -> str:
    """The digest (blake3) of the list of files in COMMIT."""
    return blake3(canonical(encode(tuple(files)))).hexdigest()


def merge_tensors(votes: Iterable[Vote]) -> tuple[TensorEntry, ...]:
    """All tensors of a save by (group, name); the chunks of one may come from several ranks."""
    merged: dict[tuple[str, str], list[TensorEntry]] = {}
    for vote in sorted(votes, key=lambda v: v.rank):
        for entry in vote.tensors:
            merged.setdefault((entry.group, entry.name), []).append(entry)
    return tuple(
        dataclasses.replace(parts[-1], chunks=tuple(chunk for part in parts for chunk in part.chunks))
        for _, parts in sorted(merged.items())
    )


def disagreement(votes: Sequence[Vote]) -> str | None:
    """Why these are not W votes of one save, or None: one key, cursor, world size and step count, every rank
    once, no file twice, every tensor whole and in files that were voted for.
    """
    first = votes[0]
    for vote in votes[1:]:
        for field in ("key", "world_size", "cursor", "optimizer_steps"):
            mine, other = getattr(first, field), getattr(vote, field)
            if mine != other:
                return f"rank {first.rank} votes with {field}={mine}, rank {vote.rank} with {other}"
    ranks = sorted(vote.rank for vote in votes)
    if ranks != list(range(first.world_size)):
        return f"votes of ranks {ranks}, but the world size is {first.world_size}"
    return _wrong_files(votes) or _wrong_tensors(votes)


def _wrong_files(votes: Sequence[Vote]) -> str | None:
    paths = Counter(entry.path for vote in votes for entry in vote.files)
    if twice := sorted(path for path, times in paths.items() if times > 1):
        return f"{twice} were written by several ranks"
    if odd := sorted(path for path in paths if not is_part_path(path)):
        return f"{odd} cannot be files of a point"
    if missing := sorted({c.file for vote in votes for t in vote.tensors for c in t.chunks} - set(paths)):
        return f"tensors lie in {missing}, which no vote lists"
    return None


def _wrong_tensors(votes: Sequence[Vote]) -> str | None:
    forms: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}
    for vote in votes:
        for entry in vote.tensors:
            known = forms.setdefault((entry.group, entry.name), (entry.dtype, entry.shape))
            if known != (entry.dtype, entry.shape):
                here = (entry.dtype, entry.shape)
                return (
                    f"{entry.group} tensor {entry.name} is {known} for one rank, {here} for rank {vote.rank}"
                )
    for entry in merge_tensors(votes):
        found, needed = sum(math.prod(c.sizes) for c in entry.chunks), math.prod(entry.shape)
        if found != needed:
            return (
                f"the chunks of {entry.group} tensor {entry.name} hold {found} elements, "
                f"shape {entry.shape} needs {needed}"
            )
    return None


def is_part_path(path: str) -> bool:
    """Whether `path` may name a file written by a rank: inside the point's folder, and none of the
    coordinator's own.
    """
    parts = PurePosixPath(path).parts
    return (
        bool(parts)
        and "\0" not in path
        and not path.startswith("/")
        and ".." not in parts
        and parts[0] not in (COMMIT, *DOCUMENTS)
    )


def document(value: Any) -> bytes:
    """A JSON document of a point, readable for people."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
