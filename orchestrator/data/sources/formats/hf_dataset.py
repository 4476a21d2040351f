"""`hf_dataset`: a folder that `datasets.Dataset.save_to_disk` wrote: the Arrow files that its `state.json`
names, and no others (a cache of a mapped dataset may lie beside them).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from orchestrator.data.sources.formats.arrow import ArrowFiles
from orchestrator.data.sources.formats.base import Format
from orchestrator.data.sources.input_file import open_input
from orchestrator.errors import ConfigError

_STATE, _SPLITS = "state.json", "dataset_dict.json"


class SavedDataset(ArrowFiles):
    """A record per row."""

    name = "hf_dataset"
    suffixes: tuple[str, ...] = (".arrow",)

    def passed_over(self, names: Sequence[str]) -> list[str]:
        """None: which files are the dataset's, its index says, not what they are called."""
        del names
        return []

    def choose(self, folder: str, names: Sequence[str]) -> list[str]:
        """The files that `state.json` names. Raises `ConfigError` if the folder is no saved dataset, holds
        several, or lacks one of its files.
        """
        if _SPLITS in names:
            splits = _json(folder, _SPLITS).get("splits")
            raise ConfigError(
                f"{folder}: a DatasetDict of the splits {splits}; give the folder of one, e.g. path="
                f"{folder}/{splits[0] if isinstance(splits, list) and splits else 'train'}"
            )
        if _STATE not in names:
            raise ConfigError(
                f"{folder}: no dataset that save_to_disk wrote: it has no {_STATE}; is "
                "data.sources[].format=hf_dataset right?"
            )
        state = _json(folder, _STATE)
        try:
            found = [str(file["filename"]) for file in state["_data_files"]]
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{folder}/{_STATE}: it names no data files; restore it") from error
        absent = sorted(set(found) - set(names))
        if absent:
            raise ConfigError(
                f"{folder}: {_STATE} names {len(found)} files, and {len(absent)} are not there, e.g. "
                f"{absent[0]}; put them back"
            )
        return found


def _json(folder: str, name: str) -> dict[str, Any]:
    try:
        with open_input(folder, name) as file:
            value = orjson.loads(file.read_at(0, file.size))
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"{folder}/{name}: cannot be read: {error}; restore it") from error
    return value if isinstance(value, dict) else {}


FORMAT: Format = SavedDataset()
