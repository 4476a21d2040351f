"""Reads YAML text and `key=value` overrides as plain JSON values, with the line of each, and all problems.

The rules are YAML 1.2's core ones, so `3e-4` is a number and `no` is a text.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

Path = tuple[str | int, ...]

# What a configuration may be: beyond any that a person writes, and far from what fills a memory.
MOST_CHARACTERS, MOST_VALUES, MOST_LEVELS = 1 << 20, 100_000, 64
_INDEX_DIGITS = 9

_OVERRIDE, _TOO_LARGE = "config.invalid_override", "config.too_large"
_NOT_YAML, _VALUE = "config.not_yaml", "config.invalid_value"


def dotted(path: Path) -> str:
    """Formats a path as a user writes it: `data.sources.0.path` for `("data", "sources", 0, "path")`."""
    return ".".join(map(str, path))


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One problem at `path`.

    `code` is the error code for the kind of problem. `text` has the problem, both values, and what to do.
    """

    path: Path
    code: str
    text: str


@dataclass(kw_only=True, slots=True)
class Reading:
    """A mapping while it is read: the value so far, the place of each part (`line 12`), and the problems."""

    value: dict[str, Any] = field(default_factory=dict)
    places: dict[Path, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    unread: bool = False  # the text could not be read: nothing is known of what stands in it
    num_values: int = 0

    def complain(self, path: Path, code: str, text: str) -> None:
        """Adds a problem. Reading continues, so that all are found at once."""
        self.problems.append(Problem(path=path, code=code, text=text))

    def place(self, path: Path) -> str:
        """Returns the place of `path`, or of the nearest written part around it; empty if there is none."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return ""


class _CoreLoader(yaml.SafeLoader):
    """YAML 1.1 reads `3e-4` as text, `no` as false, `010` as 8 and `1:30` as 90; YAML 1.2 does not."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    _level = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        """Returns the next node. Raises `_TooLargeError` if it is too deep."""
        self._level += 1
        if self._level > MOST_LEVELS:
            raise _TooLargeError(f"it is more than {MOST_LEVELS} levels deep")
        node: Node | None = super().compose_node(parent, index)
        self._level -= 1
        return node


class _TooLargeError(yaml.YAMLError):
    """The text exceeds a limit, which the message names."""


def _compose(text: str) -> Node | None:
    if len(text) > MOST_CHARACTERS:
        raise _TooLargeError(f"it has more than {MOST_CHARACTERS:,} characters")
    node: Node | None = yaml.compose(text, Loader=_CoreLoader)
    return node


_CORE_RULES = (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    # no leading zeros: octal for some, decimal for others
    ("int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
)
for _name, _pattern, _firsts in _CORE_RULES:
    _CoreLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_name}",
        re.compile(f"^(?:{_pattern})$"),
        [c if c != "\0" else "" for c in _firsts],
    )
_LEADING_ZERO = re.compile(r"^[-+]?0[0-9]+$")


def read_yaml(text: str) -> Reading:
    """Reads the mapping in `text`. Values that are not plain JSON and repeated keys are problems."""
    reading = Reading()
    try:
        node = _compose(text)
        if node is None:
            return reading
        if isinstance(node, MappingNode):
            reading.value = _plain(node, (), reading, "line ", frozenset())
            return reading
        text = f"expected sections such as `run:` and `data:`, found {_kind(node)}"
        reading.complain((), "config.wrong_type", text)
    except _TooLargeError as error:
        reading.problems = [_too_large(error)]
    except yaml.YAMLError as error:
        reading.complain((), _NOT_YAML, f"this is not YAML: {_one_line(error)}")
    reading.unread = True
    return reading


def read_mapping(mapping: Mapping[str, Any]) -> Reading:
    """Reads a mapping made in Python. Values that JSON cannot represent are problems."""
    reading = Reading()
    try:
        reading.value = _json(mapping, (), reading)
    except _TooLargeError as error:
        reading.problems = [_too_large(error)]
        reading.unread = True
    return reading


def _too_large(error: _TooLargeError) -> Problem:
    return Problem(path=(), code=_TOO_LARGE, text=f"this is too large for a configuration: {error}")


def apply_overrides(reading: Reading, overrides: Sequence[str]) -> None:
    """Sets each `section.field=value` of `overrides` in `reading`. Values follow the same rules as YAML.

    An override that cannot be set is a problem: it has no `=` or nothing after it, its key was given twice,
    or its key is inside something that is not a section.
    """
    seen: dict[Path, str] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if dots := _dots_for_brackets(key):
            text = f"override {override!r} has brackets in its key; did you mean {dots}?"
            reading.complain((), _OVERRIDE, text)
            continue
        parts = key.strip().split(".")
        if len(parts) > MOST_LEVELS:
            reading.complain(
                (),
                _TOO_LARGE,
                f"override {override[:60]!r}… is too large: "
                f"its key has {len(parts):,} parts of {MOST_LEVELS}",
            )
            continue
        # no list has an entry of more digits
        path: Path = tuple(int(p) if p.isdecimal() and len(p) <= _INDEX_DIGITS else p for p in parts)
        if not equals or not all(str(p) for p in path):
            reading.complain(
                (),
                _OVERRIDE,
                f"override {override!r} is not of the form section.field=value, e.g. train.lr=3e-4",
            )
        elif not text.strip():
            reading.complain(
                (),
                _OVERRIDE,
                f"override {override!r} has no value; write {key}=null or {key}='' if that is meant",
            )
        elif path in seen:
            text = f"is given twice, {seen[path]!r} and {override!r}; keep one"
            reading.complain(path, "config.duplicate_key", text)
        else:
            seen[path] = override
            _override(reading, path, override, text)


def _dots_for_brackets(key: str) -> str:
    """Returns `data.sources.0.path` for `data.sources[0].path`; empty for a key without brackets."""
    return re.sub(r"\[([0-9]+)\]", r".\1", key) if re.search(r"\[[0-9]+\]", key) else ""


def _override(reading: Reading, path: Path, override: str, text: str) -> None:
    inside = Reading()
    try:
        node = _compose(text)
        value = _plain(node, path, inside, "", frozenset()) if node else None
    except _TooLargeError as error:
        reading.complain(path, _TOO_LARGE, f"is too large for a configuration: {error}")
        return
    except yaml.YAMLError as error:
        reading.complain((), _NOT_YAML, f"override {override!r} is not YAML: {_one_line(error)}")
        return
    at: Any = reading.value
    for depth, part in enumerate(path[:-1]):
        at = _inside(at, part)
        if at is None:
            stands = value_at(reading.value, path[: depth + 1])
            reading.complain(
                path,
                _OVERRIDE,
                f"cannot be set by {override!r}: {dotted(path[: depth + 1])} is {stands!r}, not a section",
            )
            return
    last = path[-1]
    if not isinstance(at, dict) and not (isinstance(at, list) and isinstance(last, int) and last < len(at)):
        entry = f"; did you mean {dotted((*path[:-1], 0, last))}?" if isinstance(at, list) else ""
        reading.complain(
            path,
            _OVERRIDE,
            f"cannot be set by {override!r}: {dotted(path[:-1])} is {at!r}, which has no {last}{entry}",
        )
        return
    for known in [p for p in reading.places if p[: len(path)] == path]:
        del reading.places[known]
    key: Any = str(last) if isinstance(at, dict) else last
    at[key] = value
    reading.problems += inside.problems
    reading.places[path] = f"override {override!r}"


def _inside(at: Any, part: str | int) -> Any:
    """Returns the section `part` of `at`, and makes it if needed; None if `part` or `at` is no section."""
    if isinstance(at, list) and isinstance(part, int) and part < len(at):
        inner = at[part]
    elif isinstance(at, dict):
        if at.get(str(part)) is None:
            at[str(part)] = {}
        inner = at[str(part)]
    else:
        return None
    return inner if isinstance(inner, (dict, list)) else None


def value_at(value: Any, path: Path) -> Any:
    """Returns the value at `path` in a plain value; None if there is none."""
    for part in path:
        if isinstance(value, dict):
            value = value.get(str(part))
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            return None
    return value


def _plain(node: Node, path: Path, reading: Reading, where: str, around: frozenset[int]) -> Any:
    """Returns the JSON value of a YAML node, and records its line."""
    reading.num_values += 1
    if reading.num_values > MOST_VALUES:
        raise _TooLargeError(f"it has more than {MOST_VALUES:,} values (aliases are written out)")
    reading.places.setdefault(path, f"{where}{node.start_mark.line + 1}")
    if id(node) in around:
        text = "is an alias of something that contains it; write the value out"
        reading.complain(path, "config.recursive_alias", text)
        return None
    around |= {id(node)}
    if isinstance(node, SequenceNode):
        return [_plain(n, (*path, i), reading, where, around) for i, n in enumerate(node.value)]
    if isinstance(node, MappingNode):
        return _plain_mapping(node, path, reading, where, around)
    assert isinstance(node, ScalarNode), f"YAML has no node {node}"
    return _plain_scalar(node, path, reading)


def _plain_mapping(
    node: MappingNode, path: Path, reading: Reading, where: str, around: frozenset[int]
) -> Any:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, ScalarNode):
            text = f"has {_kind(key_node)} as a key at line {line}; a key is a word"
            reading.complain(path, "config.invalid_key", text)
            continue
        key, here = key_node.value, (*path, key_node.value)
        if key in result:
            text = f"is given twice, at {reading.places.get(here)} and line {line}; keep one"
            reading.complain(here, "config.duplicate_key", text)
            continue
        reading.places[here] = f"{where}{line}"
        result[key] = _plain(value_node, here, reading, where, around)
    return result


def _plain_scalar(node: ScalarNode, path: Path, reading: Reading) -> Any:
    kind, text = node.tag.rpartition(":")[2], node.value
    try:
        if node.tag == "tag:yaml.org,2002:str":
            return _whole_text(text, path, reading)
        if node.tag == "tag:yaml.org,2002:null":
            return None
        if node.tag == "tag:yaml.org,2002:bool":
            return {"true": True, "false": False}[text.lower()]
        if node.tag == "tag:yaml.org,2002:int":
            return _whole(int(text), path, reading)
        if node.tag == "tag:yaml.org,2002:float" and _LEADING_ZERO.match(text):
            return text
        if node.tag == "tag:yaml.org,2002:float" and math.isfinite(float(text)):
            return float(text)
    except (ValueError, KeyError):
        pass
    reading.complain(
        path,
        _VALUE,
        f"is {text!r}, tagged {kind!r}; only texts, finite numbers, true, false and null are allowed",
    )
    return None


def _json(value: Any, path: Path, reading: Reading) -> Any:
    if len(path) > MOST_LEVELS:
        raise _TooLargeError(f"it is more than {MOST_LEVELS} levels deep, or contains itself")
    if isinstance(value, Mapping):
        for key in (k for k in value if not isinstance(k, str)):
            reading.complain(path, "config.invalid_key", f"has the key {key!r}; a key is a text")
        return {k: _json(v, (*path, k), reading) for k, v in value.items() if isinstance(k, str)}
    if isinstance(value, (list, tuple)):
        return [_json(v, (*path, i), reading) for i, v in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value) is int:
        return _whole(value, path, reading)
    if isinstance(value, str):
        return _whole_text(str(value), path, reading)
    if value is None or type(value) is bool or (type(value) is float and math.isfinite(value)):
        return value
    reading.complain(
        path,
        _VALUE,
        f"is {value!r}; only texts, finite numbers, true, false, null, lists and mappings are allowed",
    )
    return None


def _whole(value: int, path: Path, reading: Reading) -> int:
    if not -(1 << 63) <= value < 1 << 63:
        text = f"is {value}; whole numbers lie between -2^63 and 2^63-1"
        reading.complain(path, "config.out_of_range", text)
    return value


def _whole_text(value: str, path: Path, reading: Reading) -> str | None:
    if value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value):
        return value
    reading.complain(path, _VALUE, f"is {value!r}, half a character; UTF-8 has no such text")
    return None


def _kind(node: Node) -> str:
    if isinstance(node, ScalarNode):
        return f"the word {node.value!r}"
    return "a list" if isinstance(node, SequenceNode) else "a mapping"


def _one_line(error: BaseException) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        context = f"{error.context}, " if error.context else ""
        mark = error.problem_mark
        return f"{context}{error.problem} (line {mark.line + 1}, column {mark.column + 1})"
    return " ".join(str(error).split()) or type(error).__name__
