"""Exports the weights of a resume point as a folder in a common format.

It is transformers' own format for a transformers model, plain safetensors for a factory's, and peft's for
adapters: the folder that `PeftModel.from_pretrained` opens, or the whole model with the adapters merged. A
folder is whole if it has EXPORT, which is written last. Every tensor's digest is verified as it is read. One
tensor is in memory at a time, or those that belong together if transformers saves an architecture in another
split. With merged adapters the whole model is. An export needs no GPU and no Ray. It needs torch for a
transformers model, or for a `dtype`.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import orjson
from blake3 import blake3

from orchestrator.checkpoint.export.export_files import FORMAT, MARKER, Exported
from orchestrator.checkpoint.files.manifest import EMA, MODEL, PartDamage
from orchestrator.checkpoint.files.part_file import SAFETENSORS, num_bytes
from orchestrator.checkpoint.files.reading import BytesTarget, PointReader, TensorRequest
from orchestrator.checkpoint.points.model_folders import as_read, kept_folder, model_given
from orchestrator.checkpoint.points.points import Point
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.checkpoint.points.verify import ReadingProgress
from orchestrator.config.field_rules import in_todays_fields, nested
from orchestrator.data.frozen import read_frozen
from orchestrator.data.tokens.resolved import as_given
from orchestrator.data.tokens.tokenizer_files import examine, id_of
from orchestrator.errors import RefusedError, ResumePointError, StorageError
from orchestrator.history.claims.claim_files import now_text
from orchestrator.json_form import encode, seal
from orchestrator.records.points import Damage, FileEntry, SavedTensor
from orchestrator.storage.files import Storage
from orchestrator.storage.local_store import TEMPORARY
from orchestrator.storage.open import above, absolute
from orchestrator.storage.tries import problem_code

if TYPE_CHECKING:
    from orchestrator.config.sections import LoraConfig, ModelConfig

SHARD_BYTES = 5 * 10**9
RUN_CONFIG = "run_config.json"
DTYPES = ("float32", "bfloat16", "float16")


def export_point(
    store: RunStore,
    name: str,
    out: str | Path,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    say: Callable[[str], None] = lambda text: None,
    averaged: bool = False,
    merged: bool = False,
    overrides: Sequence[str] = (),
) -> Exported:
    """Writes the weights of the point `name` to the folder `out`, which must not exist or must be empty.

    The folder appears as a whole or not at all: it is written beside `out` under another name (`.OUT.tmp-…`,
    which remains after a kill) and then renamed. In a bucket (`s3://…`), `out` is written directly and is
    whole as soon as EXPORT is there.

    `dtype` (one of `DTYPES`) rounds floating-point numbers as torch does; without it they are as trained.
    `averaged` writes the averages of `train.ema` in place of the weights, in float32 without a `dtype`.
    Adapters (`model.lora`) are written for peft, or `merged` into the weights that they belong to, which are
    read and held in memory. `overrides` (`key=value`) say where weights are that the point does not hold.
    `say` is called with the progress if the export takes long.

    Raises `RefusedError` for another `dtype`, a point without averages or (`merged`) without adapters, an
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
        return write_export(store, name, where, "", dtype, shard_bytes, say, averaged, merged, overrides)
    folder, run = where.folder, store.storage.root
    _require_free(folder, run)
    beside = folder.with_name(f".{folder.name}{TEMPORARY}{secrets.token_hex(8)}")
    try:
        at = Storage(str(beside))
        how = dtype, shard_bytes, say, averaged, merged, overrides
        exported = write_export(store, name, at, "", *how)
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
    averaged: bool = False,
    merged: bool = False,
    overrides: Sequence[str] = (),
) -> Exported:
    """Writes new files in `folder` of `storage`, EXPORT last. Raises as `export_point`; then there is no
    EXPORT.
    """
    try:
        point = store.read_point(name)
        tensors = PointTensors(store, name, say, averaged)
        pieces, files = _pieces(store, point, tensors, dtype, merged, overrides)
        files |= _tokenizer(store)
        written = [write_file(storage, folder, path, data) for path, data in sorted(files.items())]
        written += write_tensors(storage, folder, pieces, shard_bytes, adapters=SETTINGS in files)
    except ResumePointError as error:
        if name in store.point_names():
            raise
        raise RefusedError(
            f"{store.storage.root}: resume point {name} is gone: the run deletes older points, as "
            "resume.keep_latest says; export a newer one, or keep one first with `orchestrator pin`",
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
        averaged=averaged,
        merged=merged,
    )
    path = f"{folder}/{MARKER}" if folder else MARKER
    if not storage.create(path, seal(encode(exported))):
        raise StorageError(
            f"{storage.root}/{path} exists already: another process exports the same point there",
            code="export.second_writer",
        )
    return exported


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
    store: RunStore,
    point: Point,
    tensors: Tensors,
    dtype: str | None,
    merged: bool,
    overrides: Sequence[str],
) -> tuple[list[TensorBatch], dict[str, bytes]]:
    """Returns what is written of the tensors, and the configuration files."""
    own = orjson.dumps(nested(point.config), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    flat = in_todays_fields(point.config)
    attempt = point.key.attempt
    config = as_read(store, attempt, flat, model_given(flat, overrides), overrides)
    if config.lora is not None and not merged:
        names = [entry.name for entry in tensors.entries]
        files = {SETTINGS: settings_file(config, config.lora, names), RUN_CONFIG: own}
        return [_plain(tensors, entry, dtype, adapter_name(entry.name)) for entry in tensors.entries], files
    if merged:
        if config.lora is None:
            raise RefusedError(
                f"resume point {point.name} has whole weights (model.lora=null), and --merged merges "
                "adapters; leave --merged out",
                code="export.no_adapters",
            )
        tensors, config = MergedTensors(tensors, flat, config), config.model_copy(update={"lora": None})
    if config.factory is not None:
        return [_plain(tensors, entry, dtype) for entry in tensors.entries], {RUN_CONFIG: own}
    from orchestrator.trainer.weights.saved_form import SavedForm

    by_name = {entry.name: entry for entry in tensors.entries}
    shapes = {name: (entry.dtype, entry.shape) for name, entry in by_name.items()}
    with kept_folder(config, store.storage, attempt) as kept:
        form = SavedForm(kept, shapes, dtype, _special_ids(store, flat))

    def make(group: Any) -> Mapping[str, Buffer]:
        return form.make(group, {n: (tensors.read(by_name[n]), *shapes[n]) for n in group.names})

    pieces = [
        TensorBatch(
            forms=tuple(TensorForm(name=n, dtype=kind, shape=shape) for n, kind, shape in group.becomes),
            make=partial(make, group),
        )
        for group in form.groups
    ]
    return pieces, {**form.files, RUN_CONFIG: own}


def _plain(tensors: Tensors, entry: SavedTensor, dtype: str | None, name: str = "") -> TensorBatch:
    """Returns a tensor under another name, or its own."""
    name = name or entry.name
    if dtype is None:
        form = TensorForm(name=name, dtype=entry.dtype, shape=entry.shape)
        return TensorBatch(forms=(form,), make=lambda: {name: tensors.read(entry)})
    from orchestrator.trainer.weights.saved_form import cast_bytes, cast_name

    form = TensorForm(name=name, dtype=cast_name(entry.dtype, dtype), shape=entry.shape)
    return TensorBatch(
        forms=(form,), make=lambda: {name: cast_bytes(tensors.read(entry), entry.dtype, dtype)}
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


# ------------------------------------------------------------------------------------- the tensors of a point
class PointTensors:
    """The model's tensors of the point `name`. `entries` are ordered by name.

    `fixed`: the digests of weights that the point was trained with and does not hold, by their fields.
    `say` is called with the progress of reading. `averaged`: of each weight its average (`train.ema`), and
    the other tensors as they are.
    """

    def __init__(
        self,
        store: RunStore,
        name: str,
        say: Callable[[str], None] = lambda text: None,
        averaged: bool = False,
    ) -> None:
        """Raises `ResumePointError` naming the damaged file, and `RefusedError` if there are no averages."""
        manifest = store.read_manifest(name)
        self.name, self.fixed, self._reader = name, manifest.fixed, PointReader(store.storage, manifest)
        averages = {of: tensor for (group, of), tensor in manifest.tensors.items() if group == EMA}
        if averaged and not averages:
            raise RefusedError(
                f"resume point {name} has no averaged weights to export: it was trained with train.ema=null; "
                "leave --ema out, or take a point that was trained with train.ema",
                code="export.no_averages",
            )
        self.entries = tuple(
            averages.get(of, tensor) if averaged else tensor
            for (group, of), tensor in sorted(manifest.tensors.items())
            if group == MODEL
        )
        self._progress = ReadingProgress(say, f"weights of {name}")
        self._progress.expect(sum(num_bytes(entry.dtype, entry.shape) for entry in self.entries))

    def read(self, entry: SavedTensor) -> bytearray:
        """Returns the bytes of one whole tensor, in order. Raises `ResumePointError` if they are not as
        committed.

        Takes memory for it, and for at most 64 MiB of a file that it shares with others.
        """
        data = bytearray(num_bytes(entry.dtype, entry.shape))
        rows = range(entry.shape[0] if entry.shape else 1)
        try:
            self._reader.read({(entry.group, entry.name): TensorRequest(rows=rows, target=BytesTarget(data))})
        except PartDamage as error:
            damage = Damage(point=self.name, file=error.file, reason=error.reason)
            raise ResumePointError(
                f"{damage}; restore the file, or take another point", code="point.damaged"
            ) from error
        self._progress.read(len(data))
        return data


class Tensors(Protocol):
    """The model's tensors of a point, see `PointTensors`."""

    name: str
    fixed: Mapping[str, str]
    entries: tuple[SavedTensor, ...]

    def read(self, entry: SavedTensor) -> bytearray:
        """Returns the bytes of one whole tensor, in order."""


# --------------------------------------------------------------------------------------------------- adapters
ADAPTERS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
# peft names the tensors of a file like those of its model, without the name of the adapter.
_ADAPTER = "default"  # as in `trainer.weights.lora`, without torch
_COPY, _OF_PEFT, _LORA = f".modules_to_save.{_ADAPTER}.", "base_model.model.", ".lora_"


def adapter_name(name: str) -> str:
    """Returns the name in peft's file of a trained tensor of a model with adapters."""
    if _COPY in name:
        return _OF_PEFT + name.replace(_COPY, ".")
    path, _, leaf = name.rpartition(_LORA)
    kind, _, rest = leaf.partition(f".{_ADAPTER}")
    return f"{_OF_PEFT}{path}{_LORA}{kind}{rest}"


def settings_file(config: ModelConfig, lora: LoraConfig, names: Iterable[str]) -> bytes:
    """Returns the content of adapter_config.json, as peft writes it, for adapters of these names.

    Names of modules that peft chose (`target_modules` null or `all-linear`) are written out, so that another
    version of peft takes the same.
    """
    from orchestrator.trainer.weights.lora import peft_settings

    settings = peft_settings(lora, absolute(str(config.base)))
    if lora.target_modules is None or lora.target_modules == "all-linear":
        adapted = (name.rpartition(_LORA)[0] for name in names if _COPY not in name)
        settings.target_modules = list(dict.fromkeys(adapted))
    settings.inference_mode = True
    with tempfile.TemporaryDirectory() as folder:
        settings.save_pretrained(folder)
        return (Path(folder) / SETTINGS).read_bytes()


class MergedTensors:
    """The tensors of the whole model, with the adapters of a point merged into the weights by peft.

    Holds the model in memory. `entries` are ordered by name.
    """

    def __init__(self, point: Tensors, config: Mapping[str, Any], model: ModelConfig) -> None:
        """`config` is the point's, flat. Raises as `PointTensors.read` and `merged_tensors`."""
        from orchestrator.trainer.state.frozen_weights import merged_tensors

        trained = ((entry, point.read(entry)) for entry in point.entries)
        how = config["train.precision"], config["train.seed"]
        made = list(merged_tensors(model, *how, trained, point.name, point.fixed))
        self.name, self.fixed = point.name, point.fixed
        self.entries = tuple(entry for entry, _ in made)
        self._data = {entry.name: data for entry, data in made}

    def read(self, entry: SavedTensor) -> bytearray:
        """Returns the bytes of one whole tensor, in order."""
        return bytearray(self._data[entry.name])


# ------------------------------------------------------------------------------------------ safetensors files
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorForm:
    """A tensor as it is written. `dtype` is torch's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Its size in bytes."""
        return num_bytes(self.dtype, self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorBatch:
    """Tensors that are produced together: `make` returns the bytes of each of `forms`, by name."""

    forms: tuple[TensorForm, ...]
    make: Callable[[], Mapping[str, Buffer]]

    @property
    def num_bytes(self) -> int:
        """Their total size in bytes."""
        return sum(form.num_bytes for form in self.forms)


def write_tensors(
    storage: Storage,
    folder: str,
    pieces: Iterable[TensorBatch],
    shard_bytes: int = SHARD_BYTES,
    adapters: bool = False,
) -> list[FileEntry]:
    """Writes new files in `folder`: `model.safetensors`, or shards of at most `shard_bytes` and their index.

    peft's `adapters` are always one file, `adapter_model.safetensors`. A piece is not split. The files are
    durable afterwards. Returns them, with paths relative to `folder`. Raises `StorageError`, and what `make`
    raises; files may exist then.
    """
    # Tensors with larger numbers come first, so that every tensor is at a multiple of its number's size.
    order = sorted(pieces, key=lambda p: (-SAFETENSORS[p.forms[0].dtype][1], p.forms[0].name))
    shards = [order] if adapters else _shards(order, shard_bytes)
    if len(shards) == 1:
        return [_write_shard(storage, folder, ADAPTERS if adapters else SINGLE, shards[0])]
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    written = [_write_shard(storage, folder, name, s) for name, s in zip(names, shards, strict=True)]
    total = sum(piece.num_bytes for piece in order)
    where = {
        form.name: name
        for name, shard in zip(names, shards, strict=True)
        for piece in shard
        for form in piece.forms
    }
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    return [*written, write_file(storage, folder, INDEX, orjson.dumps(index, option=orjson.OPT_INDENT_2))]


def write_file(storage: Storage, folder: str, name: str, data: bytes) -> FileEntry:
    """Writes a new, durable file in `folder`; the returned path is relative to `folder`."""
    written = storage.write(f"{folder}/{name}" if folder else name, data)
    storage.sync(folder)
    return dataclasses.replace(written, path=name)


def _shards(pieces: Sequence[TensorBatch], shard_bytes: int) -> list[list[TensorBatch]]:
    shards: list[list[TensorBatch]] = [[]]
    room = shard_bytes
    for piece in pieces:
        if shards[-1] and piece.num_bytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(piece)
        room -= piece.num_bytes
    return shards


def _write_shard(storage: Storage, folder: str, name: str, shard: Sequence[TensorBatch]) -> FileEntry:
    head = _header([form for piece in shard for form in piece.forms])
    size = len(head) + sum(piece.num_bytes for piece in shard)
    digest = ""

    def content() -> Iterator[Buffer]:
        nonlocal digest
        hasher = blake3(head)
        yield head
        for piece in shard:
            made = piece.make()
            for form in piece.forms:
                data = made[form.name]
                assert len(data) == form.num_bytes, f"{form.name} has {len(data)} bytes, not {form.num_bytes}"
                hasher.update(data)
                yield data
        digest = hasher.hexdigest()

    storage.put(f"{folder}/{name}" if folder else name, content, size)
    storage.sync(folder)
    return FileEntry(path=name, bytes=size, digest=digest)


def _header(forms: Iterable[TensorForm]) -> bytes:
    """Returns the header: its length, and JSON with each tensor's place, padded with spaces to a multiple of
    8 bytes.
    """
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}  # required by transformers
    at = 0
    for form in forms:
        dtype = SAFETENSORS[form.dtype][0]
        content[form.name] = {
            "dtype": dtype,
            "shape": list(form.shape),
            "data_offsets": [at, at + form.num_bytes],
        }
        at += form.num_bytes
    text = orjson.dumps(content)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
