"""The mount of a run's storage: finds it, and checks for NFS options that make it unfit or slow."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.launch.doctor.check import Check, State

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
