"""Maps torch's names of number types to those of safetensors files, with their sizes."""

from __future__ import annotations

import math

from orchestrator.errors import ResumePointError

# torch's name of a type → its name in safetensors files, and the bytes of one number.
SAFETENSORS = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}


def safetensors_name(dtype: str) -> str:
    """Returns the name in safetensors files. Raises `ResumePointError` for an unknown type."""
    return _known(dtype)[0]


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Returns the size of a tensor in bytes. Raises `ResumePointError` for an unknown type."""
    return math.prod(shape) * _known(dtype)[1]


def _known(dtype: str) -> tuple[str, int]:
    if dtype not in SAFETENSORS:
        raise ResumePointError(
            f"a tensor has the type {dtype}, but this version writes only {', '.join(SAFETENSORS)}; train "
            "with one of these",
            code="model.unsupported_dtype",
        )
    return SAFETENSORS[dtype]
