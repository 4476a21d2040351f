"""What a run keeps of its data: `manifest/<source>.parquet`, `tokenizer/`, and last `manifest/data.json`.

It reads and writes a run's folder and decides nothing: `spec` and `planning.identity` compare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from orchestrator.data.sources.manifest import Manifest, from_parquet, to_parquet
from orchestrator.data.tokens.tokenizer_files import FILES
from orchestrator.errors import DataIdentityError
from orchestrator.records import decode, encode
from orchestrator.storage.files import Storage

TOKENIZER_FOLDER = "tokenizer"
_MANIFESTS = "manifest"
_RECORD = f"{_MANIFESTS}/data.json"
VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DataRecord:
    """`manifest/data.json`: the choices that were made at the first start. Its being there says all is there.

    `tokenizer` is the name as it was given; digests are blake3. The maps are keyed by source. `paths` are
    absolute; runs that were started before they were recorded have none.
    """

    version: int = VERSION
    tokenizer: str
    tokenizer_digest: str
    encoder_name: str
    encoder_version: str
    fragment_bytes: int
    window_bytes: int
    fragments_per_block: dict[str, int]
    manifests: dict[str, str]
    paths: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenData:
    """All that is frozen, as it was read back, or as it is to be written."""

    record: DataRecord
    manifests: dict[str, Manifest]
    tokenizer_files: dict[str, bytes]


def manifest_path(source: str) -> str:
    """Where a source's list lies in the run's folder."""
    return f"{_MANIFESTS}/{source}.parquet"


def write_frozen(
    folder: Path, record: DataRecord, manifests: Sequence[Manifest], tokenizer_files: dict[str, bytes]
) -> bool:
    """Writes all of it durably, the record last. False: another process wrote its record before.

    What a start that was cut off left without a record is replaced.
    """
    files = {manifest_path(manifest.source): to_parquet(manifest) for manifest in manifests}
    files |= {f"{TOKENIZER_FOLDER}/{name}": content for name, content in tokenizer_files.items()}
    document = orjson.dumps(encode(record), option=orjson.OPT_INDENT_2)
    return _write(Storage(str(folder)), files, document)


def _write(storage: Storage, files: Mapping[str, bytes], record: bytes) -> bool:
    for name in FILES:
        if f"{TOKENIZER_FOLDER}/{name}" not in files:
            storage.delete(f"{TOKENIZER_FOLDER}/{name}")
    for path, content in files.items():
        if storage.exists(path) and storage.read(path) != content:
            storage.delete(path)
        storage.create(path, content)
    return storage.create(_RECORD, record)


def copy_frozen(source: Storage, target: Storage) -> None:
    """What one run has frozen, byte for byte for another one, durably, the record last.

    What was cut off before its record is replaced. Raises `DataIdentityError` if `source` has none, or
    `target` has frozen other data.
    """
    folders = (_MANIFESTS, TOKENIZER_FOLDER)
    paths = [f"{folder}/{name}" for folder in folders for name in source.list(folder) if ".tmp-" not in name]
    if _RECORD not in paths:
        raise DataIdentityError(
            f"{source.root}: its frozen data are gone ({_RECORD}); restore manifest/ and tokenizer/"
        )
    files = {path: source.read(path) for path in paths}
    record = files.pop(_RECORD)
    if target.exists(_RECORD):
        if {_RECORD: record, **files} != {path: _read(target, path) for path in paths}:
            raise DataIdentityError(
                f"{target.root} has frozen data ({_RECORD}) other than those of {source.root}; delete the "
                "folders manifest/ and tokenizer/ there if no run needs them, or take another folder"
            )
        return
    _write(target, files, record)


def _read(storage: Storage, path: str) -> bytes | None:
    try:
        return storage.read(path)
    except FileNotFoundError:
        return None


def read_frozen(folder: Path) -> FrozenData | None:
    """What the run has frozen; None if it has not. Raises `DataIdentityError` if a part is gone or
    altered.
    """
    storage = Storage(str(folder))
    if not storage.exists(_RECORD):
        return None
    try:
        record = decode(DataRecord, orjson.loads(storage.read(_RECORD)), _RECORD)
        names = [name for name in storage.list(TOKENIZER_FOLDER) if name in FILES]
        tokenizer_files = {name: storage.read(f"{TOKENIZER_FOLDER}/{name}") for name in names}
        paths = {source: manifest_path(source) for source in record.manifests}
        manifests = {s: from_parquet(storage.read(p), str(folder / p)) for s, p in paths.items()}
    except (FileNotFoundError, orjson.JSONDecodeError) as error:
        raise DataIdentityError(
            f"{folder}: a part of the run's frozen data is gone or altered: {error}; restore the run's folder"
        ) from error
    if "tokenizer.json" not in tokenizer_files:
        raise DataIdentityError(
            f"{folder / TOKENIZER_FOLDER}: tokenizer.json is gone; restore the run's folder"
        )
    for source, digest in record.manifests.items():
        if manifests[source].digest != digest:
            raise DataIdentityError(
                f"{folder / paths[source]}: the manifest was frozen with digest {digest} and has "
                f"{manifests[source].digest}; restore the file"
            )
    return FrozenData(record=record, manifests=manifests, tokenizer_files=tokenizer_files)
