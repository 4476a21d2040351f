"""Checks the storage of runs for `orchestrator doctor`: the mount of a folder, or what a bucket can do.

A mount is searched for NFS options that make it unfit or slow. A bucket is tested for runs below its prefix,
and nothing is left there. Clocks are not compared: no decision uses a bucket's clock, and a bucket whose
clock differs much from this machine's refuses every request with a message.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from orchestrator.errors import NoConditionalCreateError
from orchestrator.storage.buckets import no_conditional_create
from orchestrator.storage.files import Storage
from orchestrator.storage.open import join

State = Literal["ok", "warn", "bad"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line: `value` is the finding, `limit` its reference, `advice` what to set and why, "" if nothing is
    to be done.
    """

    name: str
    state: State
    value: str
    limit: str = ""
    advice: str = ""

    def to_json(self) -> dict[str, Any]:
        """The check as plain JSON values."""
        return asdict(self)


_MOUNTINFO = Path("/proc/self/mountinfo")
# How long FUSE programs keep attributes by default; Linux does not list their options.
_FUSE_AGES_S = {"fuse.sshfs": 20.0, "fuse.gcsfuse": 60.0, "fuse.s3fs": 900.0}
_FIELDS_BEFORE_OPTIONAL = 6  # of a line: number, parent, device, root, place, options


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """A line of /proc/self/mountinfo: the folder `place` shows `source` (a device, `server:/export`).

    `kind` is the type of the file system. `options` are those of the mount and of the file system (`rw`,
    `hard`, `vers=4.2`).
    """

    place: str
    kind: str
    source: str
    options: tuple[str, ...]

    def value(self, name: str) -> str:
        """The value of the option `name=`; empty without such an option."""
        return next((text for key, _, text in (o.partition("=") for o in self.options) if key == name), "")


def mount_of(mountinfo: str, path: str) -> Mount | None:
    """The mount of `path`, which is absolute and without links; None if no line has it.

    `mountinfo` has the form of proc_pid_mountinfo(5); other lines are skipped.
    """
    found: Mount | None = None
    for line in mountinfo.splitlines():
        mount = _parsed(line)
        if mount is None or not (path == mount.place or path.startswith(mount.place.rstrip("/") + "/")):
            continue
        if found is None or len(mount.place) >= len(found.place):  # the last one of a place hides the others
            found = mount
    return found


def mount_at(folder: str) -> Mount | None:
    """The mount of a local folder; None if the system does not report it (no Linux)."""
    try:
        text = _MOUNTINFO.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    return mount_of(text, os.path.realpath(folder))


def attributes_age_s(mount: Mount | None) -> float:
    """The maximum age of this machine's cached file size after the file was opened, in seconds.

    0: an open asks the server, as NFS does without `nocto`, or the file system is not one of those known
    here.
    """
    if mount is None:
        return 0.0
    if mount.kind in ("nfs", "nfs4"):
        if "nocto" not in mount.options or "noac" in mount.options:
            return 0.0
        return _seconds(mount, ("actimeo", "acregmax"), 60.0)
    if mount.kind in ("cifs", "smb3"):
        return _seconds(mount, ("actimeo", "acregmax"), 1.0)
    return _FUSE_AGES_S.get(mount.kind, 0.0)


def _seconds(mount: Mount, names: Sequence[str], default: float) -> float:
    found = (mount.value(name) for name in names)
    return next((float(text) for text in found if text.isdecimal()), default)


def judge_mount(mount: Mount | None) -> Iterator[Check]:
    """One check for an NFS mount, none for any other. docs/storage.md explains what NFS needs."""
    if mount is None or mount.kind not in ("nfs", "nfs4"):
        return
    state, advice = _judged(mount)
    yield Check(
        name="nfs mount",
        state=state,
        value=f"{mount.source} on {mount.place}: {', '.join(_shown(mount))}",
        limit="hard, without nocto",
        advice="; ".join(advice),
    )


def _judged(mount: Mount) -> tuple[State, Sequence[str]]:
    state: State = "ok"
    advice = []
    if "nocto" in mount.options:
        state = "bad"
        advice.append(
            "mount without nocto: with it this machine does not ask the server when it opens a folder. It "
            "then sees claims, commits and stop requests of other machines up to 60 s late, and two launches "
            "can train one run"
        )
    for option in ("soft", "softerr"):
        if option in mount.options:
            state = "bad" if state == "bad" else "warn"
            advice.append(
                f"mount with hard instead of {option}: with {option} a write fails where the server is away "
                "for a moment, and a hard mount waits"
            )
    for option in ("noac", "sync"):
        if option in mount.options:
            state = "bad" if state == "bad" else "warn"
            advice.append(f"mount without {option}: it is not needed, and every write waits for the server")
    if (version := mount.value("vers")) and not version.startswith("4"):
        advice.append(
            f"version {version} shows a change of a folder by the folder's time alone: take version 4.1 or "
            "later, or a server whose times are finer than a second"
        )
    return state, advice


def _shown(mount: Mount) -> Iterator[str]:
    """The relevant options, and the defaults of those that Linux does not list."""
    yield f"vers={mount.value('vers') or 'unknown'}"
    yield next((option for option in ("softerr", "soft") if option in mount.options), "hard")
    yield "nocto" if "nocto" in mount.options else "cto"
    yield f"lookupcache={mount.value('lookupcache') or 'all'}"
    yield from (option for option in ("noac", "sync") if option in mount.options)


def _parsed(line: str) -> Mount | None:
    before, separator, after = line.partition(" - ")
    fields, (kind, source, options) = before.split(" "), (*after.split(" "), "", "", "")[:3]
    if not separator or len(fields) < _FIELDS_BEFORE_OPTIONAL:
        return None
    return Mount(
        place=_unescaped(fields[4]),
        kind=kind,
        source=_unescaped(source),
        options=tuple(dict.fromkeys((*fields[5].split(","), *options.split(",")))),
    )


def _unescaped(text: str) -> str:
    r"""A space stands as `\040`, a backslash as `\134`."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


REQUEST_S = 0.5  # slower requests are reported
_CREATORS = 8
_CONTENT = b"x" * 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketFacts:
    """The results of the tests below a URI.

    `exclusive`: of several creates of one name exactly one succeeded. `listed`: a list shows at once what was
    written. `reads`: it returns what was written. `deletes`: nothing is left. `request_s`: the slower of a
    write and a read of 4 KiB.
    """

    location: str
    exclusive: bool
    listed: bool
    reads: bool
    deletes: bool
    request_s: float


def try_bucket(storage: Storage) -> BucketFacts:
    """Runs the tests, with about 20 small requests. Raises `StorageError` with a remedy if one is refused."""
    name = f".doctor-{secrets.token_hex(4)}"
    tried, times = storage.beside(join(storage.root, name)), list[float]()
    try:
        began = time.monotonic()
        tried.write("written", _CONTENT)
        times.append(time.monotonic() - began)
        began = time.monotonic()
        reads = tried.read("written") == _CONTENT
        times.append(time.monotonic() - began)
        exclusive = _creates_once(tried, "claim")
        listed = tried.list("") == (["claim", "written"] if exclusive else ["written"])
    finally:
        storage.delete_folder(name)
    return BucketFacts(
        location=storage.root,
        exclusive=exclusive,
        listed=listed,
        reads=reads,
        deletes=tried.list("") == [],
        request_s=max(times),
    )


def _creates_once(storage: Storage, name: str) -> bool:
    """Whether exactly one of several concurrent creates of a name succeeds, and a later one does not."""
    try:
        with ThreadPoolExecutor(_CREATORS) as threads:
            texts = [b"%d" % number for number in range(_CREATORS)]
            created = list(threads.map(lambda text: storage.create(name, text), texts))
        if sum(created) == 1 and not storage.create(name, b"later"):
            return True
    except NoConditionalCreateError:
        pass
    storage.delete(name)
    return False


def judge_bucket(found: BucketFacts) -> Iterator[Check]:
    """A check for each fact, in a fixed order."""
    yield Check(
        name="storage",
        state="ok" if found.reads else "bad",
        value=f"{found.location} can be written and read"
        if found.reads
        else f"{found.location} does not give back what was written",
        limit="writable",
        advice="" if found.reads else "take another store: a run could not be continued from it",
    )
    yield _judge_creates(found)
    yield Check(
        name="list after write",
        state="ok" if found.listed else "bad",
        value="shows what was written" if found.listed else "does not show what was written",
        limit="at once",
        advice=""
        if found.listed
        else "claims and points are found by lists, so a start could take an older one: take another store",
    )
    yield Check(
        name="delete",
        state="ok" if found.deletes else "warn",
        value="takes away" if found.deletes else "what was deleted is still listed",
        limit="at once",
        advice=""
        if found.deletes
        else "points that are let go would stay, and cost; allow deletion in the bucket's rules",
    )
    slow = found.request_s > REQUEST_S
    yield Check(
        name="request",
        state="warn" if slow else "ok",
        value=f"{found.request_s * 1000:.0f} ms",
        limit=f"at most {REQUEST_S * 1000:.0f} ms",
        advice="every claim and every flush of the journal takes some: take a bucket in this region"
        if slow
        else "",
    )


def _judge_creates(found: BucketFacts) -> Check:
    return Check(
        name="exclusive create",
        state="ok" if found.exclusive else "bad",
        value=f"one of {_CREATORS} created it" if found.exclusive else "several created one name",
        limit="exactly one",
        advice="" if found.exclusive else f"no run starts there: {no_conditional_create(found.location)}",
    )
