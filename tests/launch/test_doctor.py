"""`orchestrator doctor`: each fact's verdict, and what is tried in a folder."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Event, Thread, get_ident
from typing import Any

import pytest

from orchestrator.cluster import connection
from orchestrator.cluster.connection import HEALTH_CHECKS
from orchestrator.launch.doctor import facts
from orchestrator.launch.doctor.diagnosis import (
    PYTHON,
    VERSIONS,
    AuthFacts,
    ClusterFacts,
    DoctorFacts,
    Gpu,
    StorageFacts,
    diagnose,
    worst,
)
from orchestrator.launch.doctor.facts import collect, look_at_storage
from orchestrator.launch.doctor.storage_check import Check, Mount, judge_mount, mount_at, mount_of
from orchestrator.storage.disk import OsDisk
from orchestrator.storage.files import Storage
from tests.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
OURS = HEALTH_CHECKS
EXT4 = Mount(place="/", kind="ext4", source="/dev/vda", options=("rw",))
STORED = StorageFacts(folder="runs", mount=EXT4, fsync_s=0.002, free_bytes=100 * GIB)
CLUSTER = ClusterFacts(address="http://head:8265", seconds=0.002, ray="2.60.0")
GPU = Gpu(name="H100", memory_bytes=80 * GIB, capability=9.0)
SOUND = DoctorFacts(
    python="3.11.7",
    versions={name: tested for name, (_, tested) in VERSIONS.items()},
    auth=AuthFacts(mode="token", token="/root/.ray/auth_token", file_mode=0o600),
    health=OURS,
    ours=OURS,
    cluster=CLUSTER,
    storage=STORED,
    shm_bytes=8 * GIB,
    open_files=65_536,
    cpus=16.0,
    cores=16,
    memory_bytes=64 * GIB,
    gpus=(GPU,),
    cpu_bfloat16=False,
)


def the_one(facts: DoctorFacts) -> Check:
    """The only check that is not ok."""
    (found,) = [check for check in diagnose(facts) if check.state != "ok"]
    return found


def stored(**facts: Any) -> dict[str, Any]:
    return {"storage": replace(STORED, **facts)}


def nfs(options: str) -> Mount:
    given = ("rw", "vers=4.2", *options.split(","))
    return Mount(place="/data", kind="nfs4", source="server:/export", options=given)


def versions(**found: str | None) -> dict[str, Any]:
    return {"versions": {**SOUND.versions, **found}}


def auth(mode: str, token: str, **more: Any) -> dict[str, Any]:
    return {"auth": AuthFacts(mode=mode, token=token, **more)}


def test_a_sound_machine_has_nothing_to_do() -> None:
    checks = diagnose(SOUND)
    assert worst(checks) == "ok"
    assert len({check.name for check in checks}) == len(checks) == 20


@pytest.mark.parametrize(
    ("facts", "state", "name", "says"),
    [
        ({"python": "3.10.2"}, "bad", "python", "newer Python"),
        ({**versions(ray="2.61.0"), "cluster": None}, "bad", "ray", r'pip install "ray==2.60.\*"'),
        (versions(torch=None), "bad", "torch", r'not installed.*pip install "torch>=2.11"'),
        (versions(transformers="5.1.0"), "warn", "transformers", "5.1.0.*no test ran with it"),
        (auth("token", ""), "bad", "ray token", "no token.*RAY_AUTH_TOKEN_PATH"),
        (auth("token", "t", trouble="t is empty"), "bad", "ray token", "t is empty"),
        (auth("", "t", is_default=True, file_mode=0o600), "warn", "ray token", "RAY_AUTH_MODE=token before"),
        (auth("token", "t", file_mode=0o644), "warn", "ray token", "mode 0644.*0600.*chmod 600 t"),
        ({"health": {}}, "warn", "ray health", "up to 65 s.*RAY_health_check_period_ms=1000"),
        (stored(trouble="no rights"), "bad", "storage", "no rights.*take another run.storage"),
        (stored(mount=replace(EXT4, kind="tmpfs")), "warn", "storage", "tmpfs.*in memory"),
        (stored(mount=nfs("nocto,soft")), "bad", "nfs mount", "nocto.*without nocto.*hard instead of soft"),
        (stored(mount=nfs("softerr")), "warn", "nfs mount", "softerr, cto.*hard instead of softerr"),
        (stored(mount=nfs("hard,noac")), "warn", "nfs mount", "noac.*without noac"),
        (stored(exclusive=False), "bad", "exclusive create", "two launches"),
        (stored(hard_links=False), "warn", "exclusive create", "without hard links.*counts as taken"),
        (stored(grows=False), "bad", "growing file", "take a run that is alive for dead"),
        (stored(fsync_s=0.3), "warn", "fsync", "300.0 ms.*at most 100.0 ms"),
        (stored(fsync_s=6.0), "bad", "fsync", "6000.0 ms.*at most 5000.0 ms"),
        (stored(free_bytes=5 * GIB), "warn", "free disk", "5.0 GiB.*at least 20.0 GiB.*keep_latest"),
        (stored(free_bytes=1 << 20), "bad", "free disk", "1 MiB.*at least 1.0 GiB"),
        (stored(skew_s=-3.0), "warn", "clock", "-3.0 s.*within 2 s.*NTP"),
        ({"shm_bytes": 64 << 20}, "bad", "shared memory", "64 MiB.*at least 256 MiB.*--shm-size=1g"),
        ({"open_files": 1024}, "warn", "open files", "1024.*at least 8192.*ulimit -n 65536"),
        ({"cpus": 0.5}, "warn", "cpus", "0.5 of 16 cores.*at least 2"),
        ({"memory_bytes": 1 * GIB}, "bad", "memory", "1.0 GiB.*at least 2.0 GiB"),
        ({"gpus": (replace(GPU, capability=7.0),)}, "warn", "gpus", "no bfloat16.*precision=float32"),
        (versions(torch="2.13.0+cpu"), "warn", "gpus", "without CUDA.*cluster.use_gpu=false"),
    ],
)
def test_what_is_wrong_is_named_with_its_limit_and_what_to_set(
    facts: dict[str, Any], state: str, name: str, says: str
) -> None:
    found = the_one(replace(SOUND, **facts))
    assert (found.name, found.state) == (name, state)
    assert re.search(says, f"{found.value} ({found.limit}) {found.advice}")
    assert found.advice


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        ({"trouble": "connection refused"}, "connection refused.*ray start --head"),
        ({"ray": "2.59.1"}, r"Ray 2.59.1.*install ray==2.59.1 here, or 2.60.0 there"),
    ],
)
def test_a_cluster_that_cannot_be_used_is_bad(cluster: dict[str, Any], says: str) -> None:
    found = the_one(replace(SOUND, cluster=replace(CLUSTER, **cluster)))
    assert (found.name, found.state) == ("cluster", "bad")
    assert re.search(says, f"{found.value} {found.advice}")


def test_a_cluster_that_asks_for_a_token_is_bad_only_without_one() -> None:
    asks = replace(SOUND, cluster=replace(CLUSTER, wants_token=True, ray=""))
    assert worst(diagnose(asks)) == "ok"
    found = the_one(replace(asks, auth=AuthFacts(mode="", token="")))
    assert (found.name, found.state) == ("cluster", "bad")


def test_the_versions_are_those_of_the_package_and_of_its_tests() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == PYTHON
    needed = dict(
        re.fullmatch(r"([\w.-]+)(?:\[.*\])?(.*)", text).groups() for text in project["dependencies"]
    )  # type: ignore[union-attr]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert {name: (needed[name], tested[name]) for name in VERSIONS} == VERSIONS


# ------------------------------------------------------------ the mount
MOUNTINFO = r"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,errors=remount-ro
31 22 0:30 / /data rw,relatime shared:7 - autofs systemd-1 rw,fd=45
32 31 0:51 / /data rw,relatime - nfs4 files:/export/of\040all rw,vers=4.2,hard,lookupcache=none,proto=tcp
33 32 0:52 / /data/my\040runs rw,noatime shared:8 master:2 - nfs files:/runs rw,vers=3,hard,nocto,addr=::1
this is no line of it
34 22 0:53 / /datasets ro - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "place", "kind", "source"),
    [
        ("/home", "/", "ext4", "/dev/vda"),
        ("/data", "/data", "nfs4", "files:/export/of all"),  # above the autofs that made it
        ("/data/my", "/data", "nfs4", "files:/export/of all"),
        ("/data/my runs/a", "/data/my runs", "nfs", "files:/runs"),
        ("/datasets", "/datasets", "tmpfs", "tmpfs"),
    ],
)
def test_the_mount_of_a_path_is_the_innermost_and_the_last(
    path: str, place: str, kind: str, source: str
) -> None:
    found = mount_of(MOUNTINFO, path)
    assert found is not None
    assert (found.place, found.kind, found.source) == (place, kind, source)


def test_options_of_the_mount_and_of_its_file_system_are_found() -> None:
    found = mount_of(MOUNTINFO, "/data/my runs")
    assert found is not None
    assert {"rw", "noatime", "nocto", "vers=3"} <= set(found.options)
    assert (found.value("vers"), found.value("lookupcache")) == ("3", "")
    assert mount_of("", "/data") is None
    assert mount_of("not a line\n", "/data") is None


def test_a_sound_nfs_mount_is_named_with_the_options_that_matter() -> None:
    (check,) = judge_mount(mount_of(MOUNTINFO, "/data"))
    assert (check.state, check.advice) == ("ok", "")
    for text in ("files:/export/of all", "vers=4.2", "hard", "cto", "lookupcache=none"):
        assert text in check.value
    (old,) = judge_mount(replace(nfs("hard"), options=("vers=3", "hard")))
    assert old.state == "ok"
    assert old.advice, "version 3 has a limit that is named"
    assert list(judge_mount(EXT4)) == list(judge_mount(None)) == []


def test_the_mount_of_a_real_folder_is_found() -> None:
    found = mount_at("/proc/self")
    assert found is not None
    assert found.kind == "proc"


# ------------------------------------------------------------ what is tried
class TakesAnyName(OsDisk):
    """A file system on which a name can be created again."""

    def link(self, old: str, new: str) -> None:
        other = f"{new}-{get_ident()}"
        os.link(old, other)
        os.replace(other, new)


def test_a_sound_folder_is_found_sound_and_left_as_it_was(tmp_path: Path) -> None:
    found = look_at_storage(str(tmp_path / "not" / "yet"))
    assert found.missing == (str(tmp_path / "not"), str(tmp_path / "not" / "yet"))
    assert (found.trouble, found.exclusive, found.hard_links, found.grows) == ("", True, True, True)
    assert found.free_bytes > 0
    assert found.fsync_s > 0
    assert found.kind
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_does_not_exist_is_said_and_one_in_a_folder_that_does_not_is_a_warning() -> None:
    one = replace(STORED, folder="/data/runs", missing=("/data/runs",))
    new = next(check for check in diagnose(replace(SOUND, storage=one)) if check.name == "storage")
    assert (new.state, new.advice) == ("ok", "")
    assert new.value == "/data/runs can be made and written, it does not exist yet (ext4)"
    typo = the_one(replace(SOUND, **stored(folder="/dta/runs", missing=("/dta", "/dta/runs"))))
    assert (typo.name, typo.state) == ("storage", "warn")
    assert typo.value == "/dta/runs can be made and written, it does not exist yet (ext4)"
    assert typo.advice == "/dta does not exist either: correct the path, mount it, or make it"


def test_a_file_system_that_gives_a_name_twice_is_found_out(tmp_path: Path) -> None:
    assert not look_at_storage(str(tmp_path), lambda root: Storage(root, TakesAnyName())).exclusive
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_tried_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is no folder" in look_at_storage(str(tmp_path / "file" / "runs")).trouble
    assert "hdfs:// is not a supported storage" in look_at_storage("hdfs://bucket/runs").trouble


def test_storage_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = Event()

    def hangs(root: str) -> Storage:
        over.wait()
        return Storage(root)

    monkeypatch.setattr(facts, "STORAGE_S", 0.05)
    assert "has not answered" in look_at_storage(str(tmp_path), hangs).trouble
    over.set()


def test_the_token_is_looked_for_where_ray_does(tmp_path: Path) -> None:
    named, default = tmp_path / "named", tmp_path / ".ray" / "auth_token"
    default.parent.mkdir()
    default.write_text("secret")
    default.chmod(0o644)
    assert connection.auth({}, tmp_path) == ("", str(default), True, 0o644, "")
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(named)}
    assert connection.auth(variables, tmp_path)[-1] == f"{named}: No such file or directory"
    assert connection.auth({**variables, "RAY_AUTH_TOKEN": "s"}, tmp_path)[1] == "$RAY_AUTH_TOKEN"
    named.touch()
    assert connection.auth(variables, tmp_path)[-1] == f"{named} is empty"


@contextmanager
def job_server(status: int, body: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802
            self.send_response(status if self.path == "/api/version" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "seen"),
    [
        (200, b'{"ray_version": "2.60.0"}', ("", "2.60.0", False)),
        (401, b"", ("", "", True)),
        (404, b"", ("no job server answers there (HTTP 404)", "", False)),
    ],
)
def test_a_job_server_is_asked_for_its_version(status: int, body: bytes, seen: tuple[str, str, bool]) -> None:
    with job_server(status, body) as address:
        trouble, _, version, wants = connection.ask(address)
        assert (trouble, version, wants) == seen
        assert connection.ask(address.removeprefix("http://"))[0] == ""


def test_an_address_without_a_server_is_said_to_have_none(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    for address in (f"127.0.0.1:{port}", f"http://127.0.0.1:{port}"):
        facts = collect(str(tmp_path), address)
        assert facts.cluster is not None
        assert "refused" in facts.cluster.trouble
        assert worst(diagnose(facts)) == "bad"
