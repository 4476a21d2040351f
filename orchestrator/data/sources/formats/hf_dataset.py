"""`hf_dataset`: a folder written by `datasets.Dataset.save_to_disk`.

Only the Arrow files that its `state.json` names are read (a cache of a mapped dataset may lie beside them).
`state.json` and the columns of `dataset_info.json` are compared with the files. A different number of rows in
`dataset_info.json` is reported and accepted: `datasets` keeps counts and sizes of the dataset that was loaded
first, also after a filter, a selection or a concatenation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from typing_extensions import override

from orchestrator.data.sources.access.input_file import open_input
from orchestrator.data.sources.formats.arrow import ArrowFiles, schema_names
from orchestrator.data.sources.formats.base import Format
from orchestrator.errors import ConfigError
from orchestrator.storage.parallel import in_threads

if TYPE_CHECKING:
    from orchestrator.data.sources.lists.file_rows import FileRow

_STATE, _SPLITS, _INFO = "state.json", "dataset_dict.json", "dataset_info.json"
_CONTRADICTING = "data.contradicting_index"
# The numbering of `save_to_disk`: a file's number, and the number of files.
_NUMBERED = re.compile(r"data-(\d{5})-of-(\d{5})\.arrow")


class SavedDataset(ArrowFiles):
    """One record per row."""

    name = "hf_dataset"
    suffixes: tuple[str, ...] = (".arrow",)
    has_index = True

    def passed_over(self, names: Sequence[str]) -> list[str]:
        """None: the dataset's index determines its files, not their names."""
        del names
        return []

    def choose(self, folder: str, names: Sequence[str]) -> list[str]:
        """The files that `state.json` names.

        Raises `ConfigError` if the folder is no saved dataset or holds several, or if `state.json`
        contradicts the files or selects some of their rows.
        """
        if _SPLITS in names:
            splits = _json(folder, _SPLITS).get("splits")
            raise ConfigError(
                f"{folder}: a DatasetDict of the splits {splits}; give the folder of one, e.g. path="
                f"{folder}/{splits[0] if isinstance(splits, list) and splits else 'train'}",
                code="data.several_splits",
            )
        if _STATE not in names:
            raise ConfigError(
                f"{folder}: it has no {_STATE}, so it is not a dataset that save_to_disk wrote; correct the "
                "path, or data.sources[].format=hf_dataset",
                code="data.missing_index",
            )
        files = _data_files(folder)
        named = [str(file["filename"]) for file in files]
        absent = sorted(set(named) - set(names))
        if absent:
            raise _contradiction(
                folder, f"it names {len(named)} files, and {len(absent)} are missing, e.g. {absent[0]}"
            )
        if twice := [name for i, name in enumerate(named) if name in named[:i]]:
            raise _contradiction(folder, f"it names {twice[0]} twice")
        _require_all_numbers(folder, named)
        return named

    @override
    def check_index(self, folder: str, rows: Mapping[str, FileRow]) -> None:
        """Compares the rows of each file, and the names of the columns."""
        for file in _data_files(folder):
            row = rows.get(str(file["filename"]))
            num = None if row is None else sum(row.group_rows)
            if num is not None and file.get("take", num) not in (num, None):
                raise _contradiction(
                    folder,
                    f"it takes {file['take']!r} rows of {file['filename']}, which has {num}",
                    _flatten("the rows that it selects"),
                )
        features = _json(folder, _INFO, {}).get("features")
        expected = sorted(features) if isinstance(features, dict) else None
        selected = _json(folder, _STATE).get("_format_columns")
        in_threads(partial(_compare_columns, folder, expected, selected), tuple(rows))

    @override
    def index_notes(self, source: str, base: str, num_rows: int) -> tuple[str, ...]:
        """Reports a number of rows in `dataset_info.json` that differs from the files."""
        try:
            info, state = _json(base, _INFO, {}), _json(base, _STATE, {})
        except ConfigError:
            return ()
        splits = info.get("splits")
        split = splits.get(str(state.get("_split"))) if isinstance(splits, dict) else None
        num = split.get("num_examples") if isinstance(split, dict) else None
        if num in (None, num_rows):
            return ()
        return (
            f"source {source}: {_INFO} says that its split {state['_split']} has {num} rows, and the files "
            f"have {num_rows}, which are read: after a filter or a selection `datasets` keeps the number of "
            "the dataset that was loaded",
        )


def _compare_columns(folder: str, expected: list[str] | None, selected: Any, name: str) -> None:
    with open_input(folder, name) as file:
        columns = sorted(schema_names(file))
    if expected is not None and expected != columns:
        raise ConfigError(
            f"{folder}/{_INFO}: it says that the columns are {expected}, and {name} has {columns}; restore "
            "the file that is wrong, or save the dataset anew",
            code=_CONTRADICTING,
        )
    if isinstance(selected, list) and (more := set(map(str, selected)) - set(columns)):
        raise _contradiction(folder, f"its _format_columns name {min(more)}, and {name} has {columns}")


def _data_files(folder: str) -> list[dict[str, Any]]:
    """The entries of `state.json` for the data files. Raises `ConfigError` if it selects rows of them."""
    state = _json(folder, _STATE)
    for key, value in state.items():
        if key.startswith("_indices") and value:
            raise _contradiction(
                folder,
                f"its {key} select and order rows of the data files, and all rows would be read",
                _flatten("the selected rows"),
            )
    files = state.get("_data_files")
    if not isinstance(files, list) or not all(isinstance(f, dict) and "filename" in f for f in files):
        raise ConfigError(f"{folder}/{_STATE}: it names no data files; restore it", code=_CONTRADICTING)
    if not files:
        raise _contradiction(folder, "it names no data files")
    for file in files:
        if file.get("skip"):
            raise _contradiction(
                folder,
                f"it skips {file['skip']!r} rows of {file['filename']}, and all rows would be read",
                _flatten("the rows that it selects"),
            )
    return files


def _require_all_numbers(folder: str, named: Sequence[str]) -> None:
    """Raises `ConfigError` if the files are numbered and some numbers are missing."""
    numbers = [(int(found[1]), int(found[2])) for name in named if (found := _NUMBERED.fullmatch(name))]
    if not numbers:
        return
    expected = {(i, numbers[0][1]) for i in range(numbers[0][1])}
    if len(numbers) != len(named) or set(numbers) != expected:
        raise _contradiction(
            folder,
            f"it names {len(named)} files, and by their names they are of {numbers[0][1]}, e.g. {named[0]}",
        )


def _flatten(what: str) -> str:
    return (
        f"to train {what}, save the dataset after dataset.flatten_indices(); to train all rows, give the "
        "files as a glob"
    )


def _contradiction(folder: str, what: str, way: str = "") -> ConfigError:
    way = way or "put back the files or restore it, or give the files to read as a glob"
    return ConfigError(f"{folder}/{_STATE}: {what}; {way}", code=_CONTRADICTING)


def _json(folder: str, name: str, absent: dict[str, Any] | None = None) -> dict[str, Any]:
    """The object in a file of the folder; `absent` (None: an error) if the file does not exist."""
    try:
        with open_input(folder, name) as file:
            value = orjson.loads(file.read_at(0, file.size))
    except (OSError, orjson.JSONDecodeError) as error:
        if absent is not None and isinstance(error, FileNotFoundError):
            return absent
        raise ConfigError(
            f"{folder}/{name}: cannot be read: {error}; restore it", code="data.unreadable_index"
        ) from error
    return value if isinstance(value, dict) else {}


FORMATS: tuple[Format, ...] = (SavedDataset(),)
