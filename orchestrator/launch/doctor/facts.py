"""Collects the facts for `launch.doctor.diagnosis`, within two seconds on a healthy machine.

It starts no Ray, loads no torch, and leaves nothing in the storage that it tests.
"""

from __future__ import annotations

import os
import platform
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from orchestrator.cluster import connection, machine
from orchestrator.cluster.connection import HEALTH_CHECKS
from orchestrator.cluster.machine import gpu_rows
from orchestrator.elastic.supervision.background_call import BackgroundCall
from orchestrator.errors import ConfigError, OrchestratorError
from orchestrator.launch.doctor.diagnosis import (
    VERSIONS,
    AuthFacts,
    ClusterFacts,
    DoctorFacts,
    Gpu,
    StorageFacts,
)
from orchestrator.launch.doctor.storage_check import BucketFacts, mount_at, try_bucket
from orchestrator.storage.buckets import is_uri
from orchestrator.storage.files import Storage
from orchestrator.storage.home import expanded, home
from orchestrator.storage.open import open_storage

STORAGE_S = 10.0  # how long to wait for storage
_CREATORS = 8


def collect(storage: str, address: str | None) -> DoctorFacts:
    """The facts of this machine, of the folder for runs, and of a cluster's address."""
    with ThreadPoolExecutor(thread_name_prefix="doctor") as threads:  # each waits for something else
        gpus = threads.submit(_gpus)
        cluster = threads.submit(_cluster, address) if address else None
        stored = look_at_storage(storage)
        mode, token, is_default, file_mode, trouble = connection.auth(os.environ, home())
        return DoctorFacts(
            python=platform.python_version(),
            versions={name: _version(name) for name in VERSIONS},
            auth=AuthFacts(
                mode=mode, token=token, is_default=is_default, file_mode=file_mode, trouble=trouble
            ),
            health=connection.health_checks(os.environ),
            ours=HEALTH_CHECKS,
            cluster=cluster.result() if cluster else None,
            storage=stored,
            shm_bytes=machine.shared_memory_bytes(),
            open_files=machine.open_file_limit(),
            cpus=machine.cpu_limit(),
            cores=os.cpu_count() or 1,
            memory_bytes=machine.memory_bytes(),
            gpus=gpus.result(),
            cpu_bfloat16=_cpu_bfloat16(),
        )


def look_at_storage(folder: str, make: Callable[[str], Storage] = open_storage) -> StorageFacts | BucketFacts:
    """Tests a folder in a temporary folder inside it, which it removes.

    A folder that does not exist is tested where it would be made. For a bucket's URI, the bucket's required
    capabilities are tested. Storage that hangs is given up after `STORAGE_S`.
    """
    asked = BackgroundCall(lambda: _try_storage(folder, make))
    asked.ask()
    try:
        found = asked.answer(STORAGE_S)
    except (OrchestratorError, OSError) as error:
        return StorageFacts(folder=folder, trouble=str(error))
    return found or StorageFacts(folder=folder, trouble=f"it has not answered for {STORAGE_S:.0f} s")


def _try_storage(folder: str, make: Callable[[str], Storage]) -> StorageFacts | BucketFacts:
    if is_uri(folder):
        return try_bucket(make(folder))
    parent, missing = Path(os.path.abspath(expanded(folder))), list[str]()
    while not parent.exists():
        missing.insert(0, str(parent))
        parent = parent.parent
    if not parent.is_dir():
        raise ConfigError(f"{parent} is no folder", code="storage.not_writable")
    tried = parent / f".doctor-{secrets.token_hex(4)}"
    tried.mkdir()
    try:
        return replace(_tried(folder, tried, make(str(tried))), missing=tuple(missing))
    finally:
        for file in tried.iterdir():
            file.unlink()
        tried.rmdir()


def _tried(folder: str, tried: Path, storage: Storage) -> StorageFacts:
    began = time.monotonic()
    storage.write("written", b"x" * 4096)
    storage.sync("")
    fsync_s = time.monotonic() - began
    with ThreadPoolExecutor(_CREATORS) as threads:
        created = list(threads.map(lambda text: storage.create("claim", text), [b"%d" % n for n in range(8)]))
    before = time.time()
    with (tried / "touched").open("wb") as file:
        file.write(b"x")
    after, touched = time.time(), (tried / "touched").stat().st_mtime
    return StorageFacts(
        folder=folder,
        mount=mount_at(str(tried)),
        exclusive=sum(created) == 1 and not storage.create("claim", b"later"),
        hard_links=_has_hard_links(tried),
        grows=_grows(storage, tried / "growing"),
        fsync_s=fsync_s,
        # a file's time may be coarser than the clock, so a slightly earlier time is no skew
        skew_s=min(0.0, touched - before) + max(0.0, touched - after),
        free_bytes=machine.free_disk_bytes(str(tried)),
    )


def _has_hard_links(tried: Path) -> bool:
    try:
        os.link(tried / "written", tried / "linked")
    except OSError:
        return False
    return True


def _grows(storage: Storage, path: Path) -> bool:
    handle = storage.append(path.name)
    try:
        handle.write(b"1")
        handle.sync()
        with path.open("rb", buffering=0) as seen:
            first = seen.read()
            handle.write(b"2")
            handle.sync()
            return (first, seen.read(), storage.read(path.name)) == (b"1", b"2", b"12")
    finally:
        handle.close()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cluster(address: str) -> ClusterFacts:
    trouble, seconds, version, wants = connection.ask(address)
    return ClusterFacts(address=address, trouble=trouble, seconds=seconds, ray=version, wants_token=wants)


def _gpus() -> Sequence[Gpu]:
    """The GPUs of NVIDIA's driver; none without a driver."""
    try:
        return [
            Gpu(name=name, memory_bytes=int(memory) << 20, capability=float(capability))
            for name, memory, capability in gpu_rows("name", "memory.total", "compute_cap")
        ]
    except ValueError:
        return []


def _cpu_bfloat16() -> bool:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    flags = {
        word for line in text.splitlines() if line.startswith(("flags", "Features")) for word in line.split()
    }
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})
