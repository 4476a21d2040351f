"""The values of a resume point: names, documents, the digest of the weights, possible damages.

`store` reads and writes them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import orjson
from blake3 import blake3

from orchestrator.checkpoint.files.manifest import PARTS
from orchestrator.checkpoint.files.part_file import part_path
from orchestrator.json_form import canonical, encode
from orchestrator.planning.state.copy_placement import gathered
from orchestrator.planning.state.state_layout import SUM_MODULUS
from orchestrator.records.cursor import Cursor
from orchestrator.records.points import FileEntry, NodeParts, Vote
from orchestrator.records.steps import StateKey

COMMIT, CURSOR, CONFIG, RNG = "COMMIT", "cursor.json", "config.json", "rng.json"
DOCUMENTS = (CURSOR, CONFIG, RNG, PARTS)
_RNG_RULE = (  # the rule of `trainer.model.build_model.seed_micro_batch`
    "per micro-batch: torch.manual_seed(first 8 bytes, little-endian, "
    "of blake3('{train.seed}:{index of its first sample}') >> 1); no other state is kept"
)
_NAME = re.compile(r"(\d{8,})-a(\d{4,})-g(\d{4,})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """The content of COMMIT.

    `parent`: what the generation that saved the point continued; `world_size`: its size.
    `run_id`: run.json's.
    `save_blocked_s`: the longest time that a rank could not train because of the save.
    `save_s`: from the first vote to COMMIT.
    `files_digest`: the blake3 of the canonical JSON of `files`.
    `state_sums`: maps each group of tensors to the sum of all its rows as 32 hex digits
    (`planning.state.state_layout`).
    `weights_digest`: that of the group `model`.
    `nodes`: those on whose disks the parts are (`resume.node_folder`); empty if they are beside COMMIT.
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
    state_sums: dict[str, str] = field(default_factory=dict)
    nodes: tuple[NodeParts, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A committed resume point without its tensors.

    `config` is the flat configuration (dotted path → JSON value) it was made with.
    """

    name: str
    commit: Commit
    cursor: Cursor
    config: dict[str, Any]

    @property
    def key(self) -> StateKey:
        """The key of the state that it holds."""
        return self.commit.key

    @property
    def num_bytes(self) -> int:
        """The size of all its files except COMMIT."""
        return sum(entry.bytes for entry in self.commit.files)


def random_numbers(seed: int) -> dict[str, Any]:
    """Returns the content of rng.json: the random number settings that a resume needs."""
    return {"rule": _RNG_RULE, "seed": seed}


def parse_point_name(name: str) -> StateKey | None:
    """Returns the key of a point's name, or None for another name. Each key has exactly one name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    step, attempt, generation = map(int, match.groups())
    key = StateKey(attempt=attempt, generation=generation, step=step)
    return key if key.point_name == name else None


def newest_first(names: Iterable[str]) -> list[str]:
    """Orders point names by (attempt, generation, step), newest first. Other names are left out."""
    keys = (parse_point_name(name) for name in names)
    return [key.point_name for key in sorted({key for key in keys if key is not None}, reverse=True)]


def files_digest(files: Sequence[FileEntry]) -> str:
    """Returns the digest (blake3) of the list of files in COMMIT."""
    return blake3(canonical(encode(tuple(files)))).hexdigest()


_EQUAL = ("key", "world_size", "cursor", "optimizer_steps", "layout")  # of all votes of a save


def disagreement(votes: Sequence[Vote]) -> str | None:
    """Returns why these are not W votes of one save, or None if they are. O(votes).

    They must have one key, cursor, world size, layout and step count. Every rank votes once and with its own
    file, either all on nodes or none, and only rank 0 lists the tensors. Votes without a layout, files and
    tensors are also accepted, because searches of machines cast such votes.
    """
    first = votes[0]
    facts = attrgetter(*_EQUAL)
    expected = facts(first)
    for vote in votes[1:]:
        if facts(vote) == expected:
            continue
        for fact in _EQUAL:
            mine, other = getattr(first, fact), getattr(vote, fact)
            if mine != other:
                return f"rank {first.rank} votes with {fact}={mine}, rank {vote.rank} with {other}"
    ranks = sorted(vote.rank for vote in votes)
    if ranks != list(range(first.world_size)):
        return f"votes of ranks {ranks}, but the world size is {first.world_size}"
    if first.layout is not None and math.prod(first.layout) != first.world_size:
        return f"the layout {first.layout} (shards, replicas) is not one of {first.world_size} ranks"
    return _wrong_files(votes) or _wrong_tensors(votes)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicasDiffer:
    """Ranks that hold the same rows hold different bits.

    `ranks` differ from `others`. If most ranks agree, `others` are these.
    """

    ranks: tuple[int, ...]
    others: tuple[int, ...]

    def sentence(
        self, name: Callable[[int], str] = lambda rank: f"rank {rank}", plug_ins: Sequence[str] = ()
    ) -> str:
        """Describes the problem; `name` maps a rank to the name of its worker.

        `plug_ins`: settings that name code of the user which could have changed the state.
        """
        code = f", or code of yours changes the state on each rank: {', '.join(plug_ins)}" if plug_ins else ""
        ranks, others = (", ".join(map(name, some)) for some in (self.ranks, self.others))
        return (
            f"replicas differ: {ranks} and {others} hold the same rows of the training state with different "
            f"bits. The memory or the processor of one of them is faulty, or they compute differently{code}"
        )

    def given_up(self, key: StateKey, name: Callable[[int], str], plug_ins: Sequence[str] = ()) -> str:
        """Describes that the save of `key` was given up for this reason; the rest as in `sentence`."""
        return f"the save of {key.point_name} was given up: {self.sentence(name, plug_ins)}"


def differing_replicas(votes: Sequence[Vote]) -> ReplicasDiffer | None:
    """Returns the ranks whose copies of the same rows differ, according to the digests of their votes.

    See `trainer.saving.staging`. None if all agree. Votes without digests are not compared. O(votes).
    """
    for fact in ("of_shard", "of_all"):
        holders: dict[int, dict[str, list[int]]] = {}  # shard -> digest -> ranks
        for vote in votes:
            if digest := getattr(vote.replicas, fact):
                num_shards = vote.layout[0] if vote.layout and fact == "of_shard" else 1
                holders.setdefault(vote.rank % num_shards, {}).setdefault(digest, []).append(vote.rank)
        for by_digest in holders.values():
            if len(by_digest) > 1:
                *odd, most = sorted(by_digest.values(), key=lambda ranks: (len(ranks), -min(ranks)))
                return ReplicasDiffer(ranks=tuple(sorted(sum(odd, []))), others=tuple(sorted(most)))
    return None


def _wrong_files(votes: Sequence[Vote]) -> str | None:
    for vote in votes:
        paths = [entry.path for entry in vote.files]
        expected = [] if vote.layout is None else [part_path(vote.rank, vote.world_size)]
        if paths != expected:
            return f"rank {vote.rank} votes for the files {paths}, its own is {expected}"
        if bool(vote.nodes) != bool(votes[0].nodes):
            return f"rank {vote.rank} has its file on {len(vote.nodes)} nodes, rank {votes[0].rank} has not"
    return None


def _wrong_tensors(votes: Sequence[Vote]) -> str | None:
    names: list[tuple[str, str]] = []
    for vote in votes:
        if vote.tensors and vote.rank:
            return f"rank {vote.rank} lists tensors, which rank 0 does"
        names += [(tensor.group, tensor.name) for tensor in vote.tensors]
    if len(set(names)) != len(names):
        return "rank 0 lists tensors twice"
    groups = {group for group, _ in names}
    for vote in votes:
        if odd := sorted(vote.sums.keys() - groups):
            return f"rank {vote.rank} has sums of the groups {odd}, of which rank 0 lists no tensors"
    return None


def state_sums(votes: Iterable[Vote]) -> dict[str, int]:
    """Returns the sum of all rows of a save for each group, modulo 2^128."""
    sums: dict[str, int] = {}
    for vote in votes:
        for group, found in vote.sums.items():
            sums[group] = (sums.get(group, 0) + found) % SUM_MODULUS
    return dict(sorted(sums.items()))


def nodes_of(votes: Iterable[Vote]) -> tuple[NodeParts, ...]:
    """Returns the nodes on which the files of a save are; empty if they are in the run's storage."""
    return gathered({vote.rank: vote.nodes for vote in votes})


def commit_document(commit: Commit) -> dict[str, Any]:
    """Returns the content of COMMIT."""
    content: dict[str, Any] = encode(commit)
    if not commit.nodes:
        del content["nodes"]  # as in points from before this field existed
    return content


def document(value: Any) -> bytes:
    """Returns a JSON document of a point, formatted for people."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
