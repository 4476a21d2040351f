"""The verdicts of `orchestrator doctor` about a machine: for each fact a verdict, what to set, and why.

Pure. `launch.doctor.facts` finds the facts. Neither loads Ray or torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from orchestrator.launch.doctor.storage_check import (
    BucketFacts,
    Check,
    Mount,
    State,
    judge_bucket,
    judge_mount,
)

# by package: the requirement in pyproject.toml, and the version that the tests use (constraints.txt)
VERSIONS = {
    "ray": ("==2.60.*", "2.60.0"),
    "torch": (">=2.11", "2.13.0"),
    "transformers": ("", "5.23.0"),
    "pyarrow": ("", "26.0.1"),
    "pydantic": (">=2", "2.14.3"),
}
PYTHON = ">=3.11"
FREE_BYTES = (1 << 30, 20 << 30)  # bad below the first, a warning below the second; all pairs
FSYNC_S = (5.0, 0.1)
SKEW_S = 2.0
SHM_BYTES = (256 << 20, 1 << 30)
MEMORY_BYTES = (2 << 30, 4 << 30)
OPEN_FILES = (1024, 8192)
DEAD_NODE_S = 15.0  # the longest time until Ray declares a node dead without a warning


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageFacts:
    """The results of the tests in a folder.

    `trouble` is why no test was possible, "" if all were. `mount` is its mount (None: not known).
    `exclusive`: of several concurrent creates of one name exactly one succeeded. `hard_links`: it supports
    them. `grows`: a file that is open for reading shows what another handle appends. `skew_s` is the
    storage's clock minus this machine's. `missing` are the folders of its path that do not exist, the
    outermost first; the tests then ran in the folder around them.
    """

    folder: str
    trouble: str = ""
    mount: Mount | None = None
    exclusive: bool = True
    hard_links: bool = True
    grows: bool = True
    fsync_s: float = 0.0
    skew_s: float = 0.0
    free_bytes: int = 0
    missing: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The type of the file system (`ext4`, `nfs4`, `tmpfs`); empty if it is not known."""
        return self.mount.kind if self.mount else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuthFacts:
    """Ray's authentication in this process's environment.

    `mode` is $RAY_AUTH_MODE. `token` is where a token was found ("" for none), `is_default` whether that is
    ~/.ray/auth_token, `file_mode` the permissions of its file. `trouble` is why a named file cannot be read.
    """

    mode: str
    token: str
    is_default: bool = False
    file_mode: int | None = None
    trouble: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFacts:
    """The answer at --address.

    `trouble` is why there was none. `ray` is its version, "" if the port does not report it. `wants_token`:
    it requires a token.
    """

    address: str
    trouble: str = ""
    seconds: float = 0.0
    ray: str = ""
    wants_token: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU: its name, memory and compute capability (8.0: Ampere)."""

    name: str
    memory_bytes: int
    capability: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorFacts:
    """All facts; None if the system does not report one.

    `health`: Ray's health-check settings in this process's environment, by name. `ours`: the settings of a
    Ray that we start.
    """

    python: str
    versions: Mapping[str, str | None]
    auth: AuthFacts
    health: Mapping[str, str]
    ours: Mapping[str, str]
    cluster: ClusterFacts | None
    storage: StorageFacts | BucketFacts
    shm_bytes: int | None
    open_files: int | None
    cpus: float
    cores: int
    memory_bytes: int | None
    gpus: Sequence[Gpu]
    cpu_bfloat16: bool


def diagnose(facts: DoctorFacts) -> tuple[Check, ...]:
    """A verdict for each fact, in a fixed order."""
    return (
        *_versions(facts),
        _auth(facts),
        _health(facts),
        *(_cluster(facts.cluster, facts) if facts.cluster else ()),
        *_storage(facts.storage),
        *_machine(facts),
    )


def worst(checks: Sequence[Check]) -> State:
    """The worst state of all."""
    states = {check.state for check in checks}
    return "bad" if "bad" in states else "warn" if "warn" in states else "ok"


# ------------------------------------------------------------ software
def _versions(facts: DoctorFacts) -> Iterator[Check]:
    good = SpecifierSet(PYTHON).contains(facts.python, prereleases=True)
    yield Check(
        name="python",
        state="ok" if good else "bad",
        value=facts.python,
        limit=PYTHON,
        advice="" if good else "make the environment with a newer Python",
    )
    for name, (needed, tested) in VERSIONS.items():
        found = facts.versions.get(name)
        limit = f"{needed}, tested with {tested}" if needed else f"tested with {tested}"
        if found is None or not SpecifierSet(needed).contains(found, prereleases=True):
            install = f'pip install "{name}{needed}"' if needed else f"pip install {name}=={tested}"
            advice = f"{install} in this environment, on all nodes"
            yield Check(name=name, state="bad", value=found or "not installed", limit=limit, advice=advice)
            continue
        same = found.partition("+")[0] == tested
        advice = f"no test ran with it; {name}=={tested} is the one that was tested"
        yield Check(
            name=name,
            state="ok" if same else "warn",
            value=found,
            limit=limit,
            advice="" if same else advice,
        )


# ------------------------------------------------------------ Ray
def _auth(facts: DoctorFacts) -> Check:
    auth, name = facts.auth, "ray token"
    if auth.mode.lower() == "token":
        if not auth.token or auth.trouble:
            advice = (
                "put the cluster's token into ~/.ray/auth_token, or name its file in RAY_AUTH_TOKEN_PATH: "
                "without it no cluster takes this machine in"
            )
            value = f"RAY_AUTH_MODE=token, {auth.trouble or 'no token'}"
            return Check(name=name, state="bad", value=value, limit="a token", advice=advice)
        return _open_token(auth, Check(name=name, state="ok", value=f"RAY_AUTH_MODE=token, {auth.token}"))
    if not auth.mode and auth.is_default:
        advice = (
            "a `ray start` here asks for this token (any local Ray leaves one behind); export "
            "RAY_AUTH_MODE=token before you submit or join by HOST:6379, with the same file on all nodes, or "
            "RAY_AUTH_MODE=disabled on all of them"
        )
        value = f"RAY_AUTH_MODE is not set, {auth.token} is there"
        return _open_token(auth, Check(name=name, state="warn", value=value, advice=advice))
    value = f"RAY_AUTH_MODE={auth.mode}" if auth.mode else "RAY_AUTH_MODE is not set, no token"
    return Check(name=name, state="ok", value=value)


def _open_token(auth: AuthFacts, check: Check) -> Check:
    """Adds a warning for a token that others can read."""
    if auth.file_mode is None or not auth.file_mode & 0o077:
        return check
    return Check(
        name=check.name,
        state="warn",
        value=f"{check.value}, mode {auth.file_mode:04o}",
        limit="0600",
        advice="; ".join(
            [
                f"chmod 600 {auth.token}: anybody who can read it can run anything on the cluster",
                *filter(None, [check.advice]),
            ]
        ),
    )


def _health(facts: DoctorFacts) -> Check:
    """Checks how long Ray takes to declare a disconnected node dead.

    That happens after a number of consecutive checks without an answer in time.
    """
    period, timeout, failures = (_number(facts.health.get(name, "")) for name in facts.ours)
    # Ray 2.60's defaults
    seconds = ((period or 3000) + (timeout or 10_000)) * (failures or 5) / 1000
    limit = f"at most {DEAD_NODE_S:.0f} s"
    value = f"a node started from here and then cut off is dead after up to {seconds:.0f} s"
    if seconds <= DEAD_NODE_S:
        return Check(name="ray health", state="ok", value=value, limit=limit)
    if facts.cluster is None and not facts.health:
        own = f"as Ray has them (up to {seconds:.0f} s); a Ray that `train` starts gets its own"
        return Check(name="ray health", state="ok", value=own)
    settings = " ".join(f"{name}={value}" for name, value in facts.ours.items())
    advice = (
        f"before `ray start`, on every node: export {settings} (a Ray that `train` starts has these values)"
    )
    return Check(name="ray health", state="warn", value=value, limit=limit, advice=advice)


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() and int(text) else None


def _cluster(found: ClusterFacts, facts: DoctorFacts) -> Iterator[Check]:
    if found.trouble:
        advice = (
            "start the head (`ray start --head`; with `--dashboard-host 0.0.0.0` it takes jobs from other "
            "machines), or correct the address: HOST:6379 to join, http://HOST:8265 to submit"
        )
        yield Check(
            name="cluster",
            state="bad",
            value=f"{found.address}: {found.trouble}",
            limit="answers",
            advice=advice,
        )
        return
    value = f"{found.address} answers in {found.seconds * 1000:.0f} ms"
    if found.wants_token and facts.auth.mode.lower() != "token":
        advice = "export RAY_AUTH_MODE=token, with the cluster's token in ~/.ray/auth_token"
        value = f"{value}, asks for a token"
        yield Check(name="cluster", state="bad", value=value, limit="takes this machine in", advice=advice)
        return
    mine = facts.versions.get("ray") or "none"
    if found.ray and found.ray != mine:
        advice = f"install ray=={found.ray} here, or {mine} there: Ray takes no other version in"
        value = f"{value}, Ray {found.ray}"
        yield Check(name="cluster", state="bad", value=value, limit=f"Ray {mine}", advice=advice)
        return
    yield Check(name="cluster", state="ok", value=f"{value}{f', Ray {found.ray}' if found.ray else ''}")


# ------------------------------------------------------------ storage
def _storage(found: StorageFacts | BucketFacts) -> Iterator[Check]:
    if isinstance(found, BucketFacts):
        yield from judge_bucket(found)
        return
    if found.trouble:
        advice = "correct its rights or the path, or take another run.storage"
        value = f"{found.folder}: {found.trouble}"
        yield Check(name="storage", state="bad", value=value, limit="writable", advice=advice)
        return
    yield _folder(found)
    yield from judge_mount(found.mount)
    yield _exclusive(found)
    yield _growing(found)
    yield _measured(
        "fsync",
        found.fsync_s,
        FSYNC_S,
        lambda value: f"{value * 1000:.1f} ms",
        "every claim, journal flush and file of a point waits for it: take a faster disk",
        high_is_bad=True,
    )
    yield _measured(
        "free disk",
        found.free_bytes,
        FREE_BYTES,
        _gib,
        "a point takes 12 bytes per parameter, and (resume.keep_latest + 1) of them lie there: make room, or "
        "take another run.storage",
    )
    yield _clock(found)


def _exclusive(found: StorageFacts) -> Check:
    why = "two launches could work on one run and spoil it; take another file system for run.storage"
    return Check(
        name="exclusive create",
        state="bad" if not found.exclusive else "ok" if found.hard_links else "warn",
        value=("one of 8 created it" if found.exclusive else "several created one name")
        + ("" if found.hard_links else ", without hard links"),
        limit="exactly one",
        advice=why
        if not found.exclusive
        else ""
        if found.hard_links
        else "claims are safe; a crash in the middle of one leaves a torn file, which counts as taken",
    )


def _growing(found: StorageFacts) -> Check:
    return Check(
        name="growing file",
        state="ok" if found.grows else "bad",
        value="another open sees it grow" if found.grows else "another open does not see what is appended",
        limit="seen after fsync",
        advice=""
        if found.grows
        else "signs of life are read so: a start would take a run that is alive for dead; mount it without "
        "caching of attributes and data, or take another file system",
    )


def _clock(found: StorageFacts) -> Check:
    ahead = abs(found.skew_s) > SKEW_S
    return Check(
        name="clock",
        state="warn" if ahead else "ok",
        value=f"storage is {found.skew_s:+.1f} s from this machine",
        limit=f"within {SKEW_S:g} s",
        advice="run an NTP service on all machines: nothing is decided by clocks, but times in the journal "
        "and ages in `status` are wrong by that much"
        if ahead
        else "",
    )


def _folder(found: StorageFacts) -> Check:
    """One missing folder is made by the first run; a missing parent is more likely a typo."""
    volatile, alien = found.kind in ("tmpfs", "ramfs"), len(found.missing) > 1
    state = "can be made and written, it does not exist yet" if found.missing else "can be written"
    advice = ["it lies in memory: take a folder on a disk or a shared file system"] if volatile else []
    if alien:
        advice.insert(0, f"{found.missing[0]} does not exist either: correct the path, mount it, or make it")
    return Check(
        name="storage",
        state="warn" if volatile or alien else "ok",
        value=f"{found.folder} {state} ({found.kind or 'unknown file system'})",
        limit="survives a restart of the machine" if volatile else "writable",
        advice="; ".join(advice),
    )


# ------------------------------------------------------------ the machine
def _machine(facts: DoctorFacts) -> Iterator[Check]:
    if facts.shm_bytes is not None:
        advice = "make it larger (in a container: --shm-size=1g): Ray's object store lies there"
        yield _measured("shared memory", facts.shm_bytes, SHM_BYTES, _gib, advice)
    if facts.open_files is not None:
        advice = (
            "ulimit -n 65536 before `ray start` and `train`: Ray holds a socket for each process of its own"
        )
        yield _measured("open files", facts.open_files, OPEN_FILES, lambda value: f"{value:.0f}", advice)
    share = facts.cpus < 2
    yield Check(
        name="cpus",
        state="warn" if share else "ok",
        value=f"{facts.cpus:g} of {facts.cores} cores",
        limit="at least 2",
        advice="raise the container's CPU limit: worker, tokenizers and Ray share one core" if share else "",
    )
    if facts.memory_bytes is not None:
        advice = (
            "a worker takes 1 GiB and its state, the feed 1.9 GiB (data.num_tokenizers=2): raise the limit"
        )
        yield _measured("memory", facts.memory_bytes, MEMORY_BYTES, _gib, advice)
    yield _accelerators(facts)


def _accelerators(facts: DoctorFacts) -> Check:
    if not facts.gpus:
        with_bf16 = "computes" if facts.cpu_bfloat16 else "does not compute"
        advice = (
            ""
            if facts.cpu_bfloat16
            else "stay with train.precision=float32 here: bf16 is emulated, and slower"
        )
        return Check(name="gpus", state="ok", value=f"none; this CPU {with_bf16} in bfloat16", advice=advice)
    names = ", ".join(sorted({f"{gpu.name} ({_gib(gpu.memory_bytes)})" for gpu in facts.gpus}))
    value = f"{len(facts.gpus)}: {names}"
    if (facts.versions.get("torch") or "").endswith("+cpu"):
        advice = "this torch is built without CUDA: install one that has it, or keep cluster.use_gpu=false"
        return Check(name="gpus", state="warn", value=value, limit="torch with CUDA", advice=advice)
    if min(gpu.capability for gpu in facts.gpus) < 8.0:
        advice = "these have no bfloat16: stay with train.precision=float32"
        return Check(name="gpus", state="warn", value=value, limit="compute capability 8.0", advice=advice)
    advice = "set cluster.use_gpu=true and train.precision=bf16 to use them"
    return Check(name="gpus", state="ok", value=f"{value}, with bfloat16", advice=advice)


def _measured(
    name: str,
    value: float,
    limits: tuple[float, float],
    text: Callable[[float], str],
    advice: str,
    high_is_bad: bool = False,
) -> Check:
    """A value with a limit for `bad` and one for `warn`. The shown limit is the violated one, or the
    second.
    """
    sign = -1 if high_is_bad else 1
    bad, warn = (sign * value < sign * limit for limit in limits)
    limit = limits[0] if bad else limits[1]
    return Check(
        name=name,
        state="bad" if bad else "warn" if warn else "ok",
        value=text(value),
        limit=f"{'at most' if high_is_bad else 'at least'} {text(limit)}",
        advice=advice if bad or warn else "",
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / 2**20:,.0f} MiB"
