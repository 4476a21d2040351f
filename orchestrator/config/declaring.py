"""How a field of the configuration is declared: what a resume may do with it, and what messages say of it.

It knows no field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Rule = Literal["same", "may_change", "free"]
# A function of a module.
FUNCTION = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
FunctionName = Annotated[str, Field(pattern=FUNCTION)]
NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}$"


def _declare(rule: Rule, expected: str, constraints: dict[str, Any]) -> Any:
    return Field(json_schema_extra={"resume": rule, "expected": expected}, **constraints)


def same(expected: str, **constraints: Any) -> Any:
    """A field that a resume must find unchanged. `expected` ends the sentence "expected …" in error texts."""
    return _declare("same", expected, constraints)


def may_change(expected: str, **constraints: Any) -> Any:
    """A field that a resume may find changed; training continues with the new value and says so."""
    return _declare("may_change", expected, constraints)


def free(expected: str, **constraints: Any) -> Any:
    """A field that has no influence on what is trained."""
    return _declare("free", expected, constraints)


def one_of(names: Sequence[str]) -> str:
    """Names as `expected` lists them: `a, b or c`."""
    return f"{', '.join(names[:-1])} or {names[-1]}"


class Section(BaseModel):
    """A section of the configuration, frozen; its fields' docstrings are their meaning."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        serialize_by_alias=True,
        defer_build=True,  # who only reads a run parses no configuration
    )
