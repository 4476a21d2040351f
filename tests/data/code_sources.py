"""Functions that sources of format `python` name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tests.data.making import some_texts

VERSION = 3


class Texts:
    """Texts that are made when they are asked for, of a corpus without files."""

    def __init__(self, num: int, longest: int) -> None:
        self._texts = some_texts(num, longest)

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"text": self._texts[index], "number": index}

    def fingerprint(self) -> str:
        return f"{len(self)} texts"


def few() -> Texts:
    """As `making.write_corpus` has them."""
    return Texts(40, 60)


def books() -> Texts:
    """More of them."""
    return Texts(400, 60)


class Numbered(Sequence[str]):
    """As many texts as asked for, of `size` characters."""

    def __init__(self, num: int, size: int) -> None:
        self._num, self._size = num, size

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._num:
            raise IndexError(index)
        return f"{index} ".ljust(self._size, "x")


def numbered() -> Numbered:
    """So many, and so long, as the environment says."""
    num, size = os.environ["NUMBERED"].split()
    return Numbered(int(num), int(size))
