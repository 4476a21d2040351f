"""Converts values of a record to plain Python values for transforms, whatever library made them.

`arrow_values` converts Arrow data to the same values.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np

from orchestrator.data.sources.records.content import BadRecordError

_AS_THEY_ARE = (str, int, float, bool, type(None), bytes, Decimal, datetime, date, time, timedelta)
_NUMBER_BYTES = 8


def plain(value: Any) -> Any:
    """A copy of the value, made of plain Python types.

    These are `None`, `bool`, `int`, `float`, `str`, `bytes`, `Decimal`, `datetime`, `date`, `time`,
    `timedelta`, and lists and dicts of these. numpy values are converted by `tolist`, other sequences to
    lists, mappings to dicts. Raises `BadRecordError` for a value of any other type.
    """
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    raise BadRecordError(
        f"a field for its transforms holds a {type(value).__name__}; a number, a text, a date, or a list or "
        "mapping of these is expected"
    )


def own_copy(value: Any) -> Any:
    """The value with its own copies of dicts and lists. Other values are shared."""
    if isinstance(value, dict):
        return {key: own_copy(each) for key, each in value.items()}
    if isinstance(value, list):
        return [own_copy(each) for each in value]
    return value


def num_bytes(value: Any) -> int:
    """The approximate bytes of a plain value: those of a text's UTF-8, 8 for a number, and 1 for each
    item.
    """
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode(errors="surrogatepass"))
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, list):
        return sum(map(num_bytes, value)) + len(value)
    if isinstance(value, dict):
        return sum(map(num_bytes, value.values())) + len(value)
    return 0 if value is None else _NUMBER_BYTES
