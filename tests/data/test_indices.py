"""An index beside data says more than names: each number, name, size and hash in it is compared with the
files, or does not matter.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orchestrator.data.common.settings import StreamSettings
from orchestrator.data.freeze import notes_of
from orchestrator.data.sources.access.input_file import LocalFile
from orchestrator.data.sources.lists.fragments import plan_source
from orchestrator.data.sources.lists.listing import list_files
from orchestrator.data.sources.lists.manifest import freeze_listed
from orchestrator.data.sources.records.content import Content
from orchestrator.errors import ConfigError, DataError
from tests.data.format_writers import PRESS, arrow_file, arrow_stream, mds, mds_entry
from tests.data.reading import read_straight
from tests.raising import raises

CODE = "data.contradicting_index"
RECORDS = [[{"text": f"document {i} of shard {shard}"} for i in range(4 + shard)] for shard in range(3)]
KEYS = tuple[str | int, ...]

# ------------------------------------------------------------------------------------------- what is mutated


def leaves(value: Any, at: KEYS = ()) -> Iterator[KEYS]:
    """The ways to all values in JSON that are no object and no list, and to all lists."""
    if isinstance(value, dict | list):
        if isinstance(value, list) and value:
            yield at
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, (*at, key))
    else:
        yield at


def others(value: Any) -> list[Any]:
    """Values to put in the place of one."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1, 10 * value + 1, -value - 1, str(value)]
    if isinstance(value, str):
        return [f"{value}x", value[:-1], value.upper() if value.upper() != value else value.lower()]
    if isinstance(value, list):
        return [value[:-1], [*value, value[0]]]
    return ["x"]


def mutations(document: dict[str, Any]) -> Iterator[tuple[KEYS, dict[str, Any]]]:
    """Copies of a document, each with one value changed, and the way to it."""
    for at in leaves(document):
        inner: Any = document
        for key in at:
            inner = inner[key]
        for value in others(inner):
            copy = json.loads(json.dumps(document))
            place = copy
            for key in at[:-1]:
                place = place[key]
            place[at[-1]] = value
            yield at, copy


def records_of(path: str, form: str) -> list[Any]:
    manifest = freeze_listed("s", list_files("s", path, form), form, Content())
    return [document for _, document in read_straight(plan_source(manifest, 1 << 20, 1 << 20))]


def is_refused(path: Path, form: str) -> bool:
    """Whether the code says that the index contradicts, at the start or when the file is read."""
    try:
        records_of(str(path), form)
    except (ConfigError, DataError) as error:
        return error.code == CODE
    return False


# -------------------------------------------------------------------------------------------------------- mds
def write_mds(folder: Path, press: str, hashes: tuple[str, ...] = ("sha1", "md5")) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    entries = []
    for number, records in enumerate(RECORDS):
        raw, name = mds(records), f"shard.{number:05d}.mds"
        zipped = (f"{name}{press}", PRESS[press](raw)) if press else None
        (folder / (zipped[0] if zipped else name)).write_bytes(zipped[1] if zipped else raw)
        entries.append(mds_entry(raw, name, zipped, hashes))
    index = {"version": 2, "shards": entries}
    (folder / "index.json").write_text(json.dumps(index))
    return index


def needs_no_check(at: KEYS, press: str) -> bool:
    """What does not matter where a compressed shard is read: the name of the uncompressed one, and the hash
    of the compressed bytes, whose content has a hash of its own.
    """
    inner = at[2:]
    return bool(press) and (inner == ("raw_data", "basename") or inner[:2] == ("zip_data", "hashes"))


@pytest.mark.quick(".zst")
@pytest.mark.parametrize("press", ["", ".gz", ".zst"])
def test_each_value_of_an_mds_index_is_compared_with_the_shards_or_does_not_matter(
    press: str, tmp_path: Path
) -> None:
    index = write_mds(tmp_path, press)
    path, num = tmp_path / "index.json", 0
    right = records_of(str(tmp_path), "mds")
    assert len(right) == sum(map(len, RECORDS))
    for at, mutated in mutations(index):
        path.write_text(json.dumps(mutated))
        if needs_no_check(at, press):
            assert records_of(str(tmp_path), "mds") == right, at
        else:
            assert is_refused(tmp_path, "mds"), (at, mutated)
        num += 1
    assert num > 100


def test_mds_shards_that_the_index_does_not_name_are_refused_and_a_glob_reads_them(tmp_path: Path) -> None:
    index = write_mds(tmp_path, "")
    (tmp_path / "index.json").write_text(json.dumps({**index, "shards": index["shards"][:2]}))
    with raises(ConfigError, CODE, "index.json", "shard.00002.mds") as refused:
        records_of(str(tmp_path), "mds")
    assert refused.value.exit_code == 2
    assert len(records_of(f"{tmp_path}/*.mds", "mds")) == sum(map(len, RECORDS))


def test_an_index_of_several_folders_is_compared_and_so_is_each_of_several_paths(tmp_path: Path) -> None:
    merged: dict[str, Any] = {"version": 2, "shards": []}
    for name in ("a", "b"):
        for entry in write_mds(tmp_path / name, "")["shards"]:
            raw = {**entry["raw_data"], "basename": f"{name}/{entry['raw_data']['basename']}"}
            merged["shards"].append({**entry, "raw_data": raw})
    (tmp_path / "index.json").write_text(json.dumps(merged))
    num = len(records_of(str(tmp_path), "mds"))
    assert num == 2 * sum(map(len, RECORDS))
    merged["shards"][-1]["samples"] += 1
    (tmp_path / "index.json").write_text(json.dumps(merged))
    assert is_refused(tmp_path, "mds")
    both = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert len(list_files("s", both, "mds").names) == 6
    text = (tmp_path / "b" / "index.json").read_text()
    (tmp_path / "b" / "index.json").write_text(text.replace('"samples": 5', '"samples": 4'))
    with raises(ConfigError, CODE, "index.json"):
        freeze_listed("s", list_files("s", both, "mds"), "mds", Content())


def test_a_shard_that_was_changed_at_its_size_is_found_by_its_hash_while_it_is_read(tmp_path: Path) -> None:
    write_mds(tmp_path, "", ("sha1",))
    shard = tmp_path / "shard.00001.mds"
    shard.write_bytes(shard.read_bytes().replace(b"document 2", b"document 7"))
    with raises(DataError, CODE, "shard.00001.mds"):
        records_of(str(tmp_path), "mds")


def test_a_start_reads_the_heads_of_shards_and_no_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = mds([{"text": "x" * (1 << 20)} for _ in range(16)])
    (tmp_path / "shard.00000.mds").write_bytes(raw)
    index = {"version": 2, "shards": [mds_entry(raw, "shard.00000.mds", None)]}
    (tmp_path / "index.json").write_text(json.dumps(index))
    num_bytes = 0
    read_at = LocalFile.read_at

    def counted(file: LocalFile, offset: int, size: int) -> bytes:
        nonlocal num_bytes
        data = read_at(file, offset, size)
        num_bytes += len(data)
        return data

    monkeypatch.setattr(LocalFile, "read_at", counted)
    freeze_listed("s", list_files("s", str(tmp_path), "mds"), "mds", Content())
    assert num_bytes < 100_000


# ------------------------------------------------------------------------------------------------- hf_dataset
def write_saved(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """As `datasets` 5.2 writes a dataset that was loaded from one split. Files of one and the other kind."""
    folder.mkdir(exist_ok=True)
    files = []
    for number, records in enumerate(RECORDS):
        files.append({"filename": f"data-{number:05d}-of-{len(RECORDS):05d}.arrow"})
        write = arrow_file if number == 1 else arrow_stream
        (folder / files[-1]["filename"]).write_bytes(write(records))
    state = {
        "_data_files": files,
        "_fingerprint": "7bdf875cd845c972",
        "_format_columns": ["text"],
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": "train",
    }
    num = sum(map(len, RECORDS))
    split = {"name": "train", "num_bytes": 270, "num_examples": num, "dataset_name": "parquet"}
    info = {
        "dataset_size": 270,
        "download_size": 1010,
        "features": {"text": {"dtype": "string", "_type": "Value"}},
        "size_in_bytes": 1280,
        "splits": {"train": split, "test": {**split, "name": "test"}},
    }
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return state, info


def test_each_value_of_a_saved_datasets_state_is_compared_or_does_not_matter(tmp_path: Path) -> None:
    state, _ = write_saved(tmp_path)
    right = records_of(str(tmp_path), "hf_dataset")
    for at, mutated in mutations(state):
        (tmp_path / "state.json").write_text(json.dumps(mutated))
        if at[0] == "_data_files" or set(mutated["_format_columns"]) - {"text"}:
            assert is_refused(tmp_path, "hf_dataset"), (at, mutated)
        else:  # how `datasets` shows the columns, where the dataset came from
            assert records_of(str(tmp_path), "hf_dataset") == right, at


@pytest.mark.parametrize(
    "more",
    [
        {"_indices_files": [{"filename": "indices.arrow"}]},
        {"_indices_data_files": [{"filename": "indices.arrow", "skip": 0, "take": 3}]},
        {"_indices": "indices.arrow"},
        {"_data_files": []},
        {"_data_files": [{"filename": "dataset.arrow", "skip": 1, "take": 4}]},
        {"_data_files": [{"filename": "dataset.arrow", "skip": 0, "take": 3}]},
        {"_data_files": [{"filename": "dataset.arrow", "skip": 0, "take": 0}]},
        {"_data_files": [{"filename": "dataset.arrow"}, {"filename": "data-00000-of-00001.arrow"}]},
        {"_data_files": [{"filename": "data-00000-of-00002.arrow"}]},
    ],
)
def test_a_state_that_selects_rows_or_misses_files_is_refused(more: dict[str, Any], tmp_path: Path) -> None:
    plain = {"_data_files": [{"filename": "dataset.arrow", "skip": 0, "take": 4}], "_indices_files": []}
    for name in ("dataset.arrow", "data-00000-of-00001.arrow", "data-00000-of-00002.arrow"):
        (tmp_path / name).write_bytes(arrow_stream(RECORDS[0]))
    (tmp_path / "state.json").write_text(json.dumps(plain))
    assert len(records_of(str(tmp_path), "hf_dataset")) == 4
    (tmp_path / "state.json").write_text(json.dumps({**plain, **more}))
    with raises(ConfigError, CODE, "state.json") as refused:
        records_of(str(tmp_path), "hf_dataset")
    assert refused.value.exit_code == 2


def test_files_that_an_earlier_save_into_the_folder_left_are_no_contradiction(tmp_path: Path) -> None:
    write_saved(tmp_path)
    right = records_of(str(tmp_path), "hf_dataset")
    for number in range(4):
        shutil.copy(tmp_path / "data-00000-of-00003.arrow", tmp_path / f"data-{number:05d}-of-00004.arrow")
    assert records_of(str(tmp_path), "hf_dataset") == right


def test_columns_of_dataset_info_are_compared_and_its_counts_are_reported(tmp_path: Path) -> None:
    """`datasets` writes the counts of the dataset that was loaded, also of one that was filtered since."""
    _, info = write_saved(tmp_path)
    right = records_of(str(tmp_path), "hf_dataset")
    for at, mutated in mutations(info):
        (tmp_path / "dataset_info.json").write_text(json.dumps(mutated))
        assert records_of(str(tmp_path), "hf_dataset") == right, at
        manifest = freeze_listed("s", list_files("s", str(tmp_path), "hf_dataset"), "hf_dataset", Content())
        notes = notes_of(plan_source(manifest, 1 << 20, 1 << 20), StreamSettings())
        assert any("dataset_info.json" in note for note in notes) == (
            at == ("splits", "train", "num_examples")
        )
    for features in ({"txt": info["features"]["text"]}, {**info["features"], "more": {}}, {}):
        (tmp_path / "dataset_info.json").write_text(json.dumps({**info, "features": features}))
        assert is_refused(tmp_path, "hf_dataset")
    (tmp_path / "dataset_info.json").unlink()
    assert records_of(str(tmp_path), "hf_dataset") == right


# -------------------------------------------------------------------------- counts in the files' own indices
def test_a_unit_with_other_rows_than_its_file_says_stops_while_it_is_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [f"t{i}" for i in range(10)]}), tmp_path / "a.parquet", row_group_size=5)
    (tmp_path / "a.arrow").write_bytes(arrow_stream(RECORDS[0]))
    for form in ("parquet", "arrow"):
        manifest = freeze_listed("s", list_files("s", str(tmp_path), form), form, Content())
        (row,) = manifest.files
        for change in (-1, 1):
            rows = (row.group_rows[0] + change, *row.group_rows[1:])
            wrong = manifest.files.replaced({row.path: type(row)(**{**_fields(row), "group_rows": rows})})
            plan = plan_source(type(manifest)(**{**_fields(manifest), "files": wrong}), 1 << 20, 1 << 20)
            with raises(DataError, CODE, row.path):
                read_straight(plan)


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}
