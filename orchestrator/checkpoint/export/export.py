"""Exports the weights of a resume point as a folder in a common format.

It is transformers' own format for a transformers model, and plain safetensors for a factory's. A folder is
whole if it has EXPORT, which is written last. Every tensor's digest is verified as it is read. One tensor is
in memory at a time; if transformers saves an architecture in another split, the tensors that belong together
are. An export needs no GPU and no Ray. It needs torch for a transformers model, or for a `dtype`.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from orchestrator.checkpoint.export.export_files import FORMAT, MARKER, Exported
from orchestrator.checkpoint.export.point_tensors import PointTensors
from orchestrator.checkpoint.export.tensor_files import (
    SHARD_BYTES,
    Buffer,
    Form,
    Piece,
    write_file,
    write_tensors,
)
from orchestrator.checkpoint.points.points import Point
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.stored import in_todays_fields
from orchestrator.config.train_sections import ModelConfig
from orchestrator.data.frozen import read_frozen
from orchestrator.data.tokens.resolved import as_given
from orchestrator.data.tokens.tokenizer_files import examine, id_of
from orchestrator.errors import RefusedError, ResumePointError, StorageError
from orchestrator.history.claims.claim_files import now_text
from orchestrator.json_form import encode
from orchestrator.records.points import SavedTensor
from orchestrator.storage.files import Storage
from orchestrator.storage.local_store import TEMPORARY
from orchestrator.storage.open import above
from orchestrator.storage.sealed import seal
from orchestrator.storage.tries import problem_code

RUN_CONFIG = "run_config.json"
DTYPES = ("float32", "bfloat16", "float16")


def export_point(
    store: RunStore,
    name: str,
    out: str | Path,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    say: Callable[[str], None] = lambda text: None,
) -> Exported:
    """Writes the weights of the point `name` to the folder `out`, which must not exist or must be empty.

    The folder appears as a whole or not at all: it is written beside `out` under another name (`.OUT.tmp-…`,
    which remains after a kill) and then renamed. In a bucket (`s3://…`), `out` is written directly and is
    whole as soon as EXPORT is there.

    `dtype` (one of `DTYPES`) rounds floating-point numbers as torch does; without it they are as trained.
    `say` is called with the progress if the export takes long. Raises `RefusedError` for another `dtype`, an
    `out` that is taken or in the run's folder, and a point that the run has deleted meanwhile. Raises
    `ResumePointError` naming the damaged file, and `StorageError`.
    """
    if dtype is not None and dtype not in DTYPES:
        raise RefusedError(
            f"--dtype={dtype} is not supported; write {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, or leave "
            "--dtype out to keep the numbers as trained",
            code="export.unknown_dtype",
        )
    where = store.storage.beside(str(out))
    if where.folder is None:
        _require_free_prefix(where, store.storage.root)
        return write_export(store, name, where, "", dtype, shard_bytes, say)
    folder, run = where.folder, store.storage.root
    _require_free(folder, run)
    beside = folder.with_name(f".{folder.name}{TEMPORARY}{secrets.token_hex(8)}")
    try:
        exported = write_export(store, name, Storage(str(beside)), "", dtype, shard_bytes, say)
        _require_free(folder, run)
        os.rename(beside, folder)  # also if `out` is an empty folder
        Storage(str(folder.parent)).sync("")
    except OSError as error:
        raise StorageError(
            f"cannot make {folder}: {error}; give another folder", code=problem_code(error)
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return exported


def write_export(
    store: RunStore,
    name: str,
    storage: Storage,
    folder: str,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    say: Callable[[str], None] = lambda text: None,
) -> Exported:
    """Writes new files in `folder` of `storage`, EXPORT last. Raises as `export_point`; then there is no
    EXPORT.
    """
    try:
        point = store.read_point(name)
        tensors = PointTensors(store, name, say)
        pieces, files = _pieces(store, point, tensors, dtype)
        files |= _tokenizer(store)
        written = [write_file(storage, folder, path, data) for path, data in sorted(files.items())]
        written += write_tensors(storage, folder, pieces, shard_bytes)
    except ResumePointError as error:
        if name in store.point_names():
            raise
        raise RefusedError(
            f"{store.storage.root}: resume point {name} is gone: the run deletes older points, as "
            "resume.keep_latest "
            "says; export a newer one, or keep one first with `orchestrator pin`",
            code="point.deleted",
        ) from error
    run = store.read_run()
    exported = Exported(
        format=FORMAT,
        run=run.name if run else "",
        run_id=point.commit.run_id,
        point=name,
        weights_digest=point.commit.weights_digest,
        dtype=dtype or "",
        created=now_text(),
        files=tuple(sorted(written, key=lambda entry: entry.path)),
    )
    path = f"{folder}/{MARKER}" if folder else MARKER
    if not storage.create(path, seal(encode(exported))):
        raise StorageError(
            f"{storage.root}/{path} exists already: another process exports the same point there",
            code="export.second_writer",
        )
    return exported


def model_of(config: Mapping[str, Any]) -> ModelConfig:
    """Returns the `model` section of a point's flat configuration."""
    fields = {path.removeprefix("model."): v for path, v in config.items() if path.startswith("model.")}
    return ModelConfig.model_validate_json(orjson.dumps(fields))


# ---------------------------------------------------------------------------------------------------- inside
def _require_outside(where: str, run: str) -> None:
    if where == run or run in above(where):
        raise RefusedError(
            f"{where} is in the run's folder {run}, where only the run writes; give another folder",
            code="export.inside_run",
        )


def _require_free_prefix(where: Storage, run: str) -> None:
    _require_outside(where.root, run)
    if where.list(""):
        raise RefusedError(
            f"{where.root} is not empty, and an export overwrites nothing; give another prefix, or delete "
            "the files of an interrupted export (a complete one has EXPORT)",
            code="export.not_empty",
        )


def _require_free(folder: Path, run: str) -> None:
    _require_outside(str(folder), run)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RefusedError(
            f"{folder} exists and is not empty, and an export overwrites nothing; give another folder",
            code="export.not_empty",
        )


def _pieces(
    store: RunStore, point: Point, tensors: PointTensors, dtype: str | None
) -> tuple[list[Piece], dict[str, bytes]]:
    """Returns what is written of the tensors, and the configuration files."""
    own = orjson.dumps(_sections(point.config), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    config = model_of(in_todays_fields(point.config))
    if config.factory is not None:
        return [_plain(tensors, entry, dtype) for entry in tensors.entries], {RUN_CONFIG: own}
    from orchestrator.trainer.weights.saved_form import SavedForm

    by_name = {entry.name: entry for entry in tensors.entries}
    shapes = {name: (entry.dtype, entry.shape) for name, entry in by_name.items()}
    form = SavedForm(config, shapes, dtype, _special_ids(store, in_todays_fields(point.config)))

    def make(group: Any) -> Mapping[str, Buffer]:
        return form.make(group, {n: (tensors.read(by_name[n]), *shapes[n]) for n in group.names})

    pieces = [
        Piece(
            forms=tuple(Form(name=n, dtype=kind, shape=shape) for n, kind, shape in group.becomes),
            make=partial(make, group),
        )
        for group in form.groups
    ]
    return pieces, {**form.files, RUN_CONFIG: own}


def _plain(tensors: PointTensors, entry: SavedTensor, dtype: str | None) -> Piece:
    """Returns a tensor under its own name."""
    if dtype is None:
        form = Form(name=entry.name, dtype=entry.dtype, shape=entry.shape)
        return Piece(forms=(form,), make=lambda: {entry.name: tensors.read(entry)})
    from orchestrator.trainer.weights.saved_form import cast_bytes, cast_name

    form = Form(name=entry.name, dtype=cast_name(entry.dtype, dtype), shape=entry.shape)
    return Piece(
        forms=(form,), make=lambda: {entry.name: cast_bytes(tensors.read(entry), entry.dtype, dtype)}
    )


def _tokenizer(store: RunStore) -> dict[str, bytes]:
    """Returns the run's frozen tokenizer files as they were given, without other files beside them."""
    frozen = read_frozen(store.storage)
    return {} if frozen is None else as_given(dict(frozen.tokenizer_files))


def _special_ids(store: RunStore, config: Mapping[str, Any]) -> dict[str, int | None]:
    """Returns BOS and EOS of the run's tokenizer, preferably those that the configuration names.

    By default, transformers' configurations have the ids of some other tokenizer.
    """
    frozen = read_frozen(store.storage)
    if frozen is None:
        return {}
    facts = examine(str(store.storage.root), frozen.tokenizer_files)
    found = {"bos": facts.bos_id, "eos": facts.eos_id}
    for name in found:
        asked = config.get(f"data.{name}")
        if isinstance(asked, str) and asked != "auto":
            found[name] = id_of(asked, facts.model)
    return {f"{name}_token_id": number for name, number in found.items()}


def _sections(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {}
    for path, value in flat.items():
        section, _, field = path.partition(".")
        sections.setdefault(section, {})[field] = value
    return sections
