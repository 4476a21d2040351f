"""What is not shown to anybody: secrets in a command line, an override or a configuration, found by the name
of a key and by the look of a value.

Pure. Whoever writes or shows something that a user typed applies it: the command in the journal's `attempt`,
every view of a configuration (the page, `status`). It is not applied to what a run continues from: the
configuration in the journal and in a point's config.json, which a resume compares and continues.

It finds what it knows: a secret under a harmless name that looks like no key of a known service stays.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import yaml

HIDDEN = "***"
_SECRET = re.compile(
    r"token|secret|password|passwd|key|credential|signature|(?<![a-z])sig(?![a-z])", re.IGNORECASE
)
# names that hold these words and mean something else: a tokenizer and a choice of ours whatever their value,
# the others numbers
_TOKENIZER = re.compile(r"tokeni[sz]\w*|special_tokens\w*", re.IGNORECASE)
_COUNT = re.compile(
    r"tokens(?=_|\b)|token(?=_ids?\b)|keys?(?=_value|_dim|_length|_heads|_size)", re.IGNORECASE
)
_USER = re.compile(r"(?<=://)[^/\s?#'\"]*@")  # what stands before the host of a URI
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*(e[-+]?\d+)?|true|false|null|none)|\[[-\d\s,]*\]|", re.IGNORECASE)
_KNOWN = re.compile(  # keys of services that say what they are
    r"\b(?:hf_\w{16,}|gh[opsur]_\w{16,}|github_pat_\w{16,}|sk-[\w-]{16,}|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)|(?<=\bBearer )[\w.~+/=-]+"
)
_QUOTED = r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'"""
_PAIR = re.compile(  # key=value and key: value inside a text, as in a mapping or a query
    rf"""(?P<key>[\w.-]+)(?P<is>["']?\s*(?:=|:(?!//))\s*)(?P<value>{_QUOTED}|\[[^\]]*\]|[^\s,;&}}\]]+)"""
)


def is_secret(key: str, value: object = "") -> bool:
    """Whether what stands under `key`, a dotted path, is to be hidden. A number under a name like
    `train.max_tokens` or `num_key_value_heads` counts something and is not.
    """
    name = _TOKENIZER.sub("", key)
    if value is None or isinstance(value, bool | int | float) or _NUMBER.fullmatch(str(value).strip()):
        name = _COUNT.sub("", name)
    return bool(_SECRET.search(name))


def redacted_text(text: str) -> str:
    """`text` without the secrets in it: user and password of a URI, values of secret keys, known keys."""
    text = _KNOWN.sub(HIDDEN, _USER.sub(f"{HIDDEN}@", text))
    return _PAIR.sub(_hidden_pair, text)


def redacted(value: Any, key: str = "") -> Any:
    """A JSON value that stands under `key`, without the secrets in it, at any depth."""
    if isinstance(value, Mapping):
        return {str(k): redacted(v, str(k)) for k, v in value.items()} if not is_secret(key) else HIDDEN
    if isinstance(value, str):
        return HIDDEN if value and is_secret(key, value) else redacted_text(value)
    if isinstance(value, list | tuple):
        return [redacted(each, key) for each in value]
    return HIDDEN if value is not None and is_secret(key, value) else value


def redacted_override(override: str) -> str:
    """A `key=value` as it is typed; a list or mapping that holds a secret is written anew, as JSON."""
    key, equals, value = override.partition("=")
    if equals and value and is_secret(key, value):
        return f"{key}={HIDDEN}"
    with suppress(yaml.YAMLError, RecursionError):
        given = yaml.safe_load(value)
        if isinstance(given, dict | list) and (shown := redacted(given, key)) != given:
            return f"{key}={json.dumps(shown, default=str)}"
    return f"{redacted_text(key)}{equals}{redacted_text(value)}"


def command_line(program: Iterable[str], config: object, overrides: Iterable[str]) -> str:
    """The command that continues a run, as it is typed in a shell; secrets in it are hidden, so that one
    with a secret is to be completed before it works.
    """
    return shlex.join([*program, redacted_text(str(config)), *map(redacted_override, overrides)])


def _hidden_pair(pair: re.Match[str]) -> str:
    key, between, value = pair.group("key", "is", "value")
    quote = value[0] if value[0] in "\"'" else ""
    inside = value[1:-1] if quote else value
    if inside and is_secret(key, inside):
        return f"{key}{between}{quote}{HIDDEN}{quote}"
    return f"{key}{between}{quote}{_PAIR.sub(_hidden_pair, inside)}{quote}"  # `Failed: https://h/?token=…`
