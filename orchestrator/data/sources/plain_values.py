"""Values of a record as plain Python values: what a transform sees of a field, whatever library made it.

It knows no format; what Arrow holds, `arrow_values` turns into the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np

from orchestrator.data.sources.content import BadRecordError

_AS_THEY_ARE = (str, int, float, bool, type(None), bytes, Decimal, datetime, date, time, timedelta)
_NUMBER_BYTES = 8


def plain(value: Any) -> Any:
    """A copy of the value, of `None`, `bool`, `int`, `float`, `str`, `bytes`, `Decimal`, `datetime`, `date`,
    `time`, `timedelta`, and lists and dicts of these: of numpy's values what `tolist` gives, of other
    sequences lists, of mappings dicts.

    Raises `BadRecordError` for a value of any other type.
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
    """The value with dicts and lists that no other has; what else it holds is the same."""
    if isinstance(value, dict):
        return {key: own_copy(each) for key, each in value.items()}
    if isinstance(value, list):
        return [own_copy(each) for each in value]
    return value


def num_bytes(value: Any) -> int:
    """About the bytes of a plain value: those of a text's UTF-8, 8 for a number, and 1 for each item."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode(errors="surrogatepass"))
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, list):
        return sum(map(num_bytes, value)) + len(value)
    if isinstance(value, dict):
        return sum(map(num_bytes, value.values())) + len(value)
    return 0 if value is None else _NUMBER_BYTES
