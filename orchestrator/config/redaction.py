"""Hides secrets in command lines, overrides and configurations, by the names of keys and the form of values.

Pure. All code that stores or shows something that a user typed applies it: the command in the journal's
`attempt`, and every view of a configuration (the page, `status`). It is not applied to the configuration in
the journal and in a point's config.json, because a resume compares and continues it.

It does not find a secret under a harmless name whose value has the form of no known service's key.
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
# names that contain these words but are no secrets: a tokenizer and special tokens with any value, the others
# with numbers
_TOKENIZER = re.compile(r"tokeni[sz]\w*|special_tokens\w*", re.IGNORECASE)
_COUNT = re.compile(
    r"tokens(?=_|\b)|token(?=_ids?\b)|keys?(?=_value|_dim|_length|_heads|_size)", re.IGNORECASE
)
_USER = re.compile(r"(?<=://)[^/\s?#'\"]*@")  # user and password before the host of a URI
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*(e[-+]?\d+)?|true|false|null|none)|\[[-\d\s,]*\]|", re.IGNORECASE)
_KNOWN = re.compile(  # keys of services, which have a known form
    r"\b(?:hf_\w{16,}|gh[opsur]_\w{16,}|github_pat_\w{16,}|sk-[\w-]{16,}|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)|(?<=\bBearer )[\w.~+/=-]+"
)
_QUOTED = r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'"""
_PAIR = re.compile(  # key=value and key: value inside a text, as in a mapping or a query
    rf"""(?P<key>[\w.-]+)(?P<is>["']?\s*(?:=|:(?!//))\s*)(?P<value>{_QUOTED}|\[[^\]]*\]|[^\s,;&}}\]]+)"""
)


def is_secret(key: str, value: object = "") -> bool:
    """Whether the value of `key`, a dotted path, is hidden.

    A number under a name like `train.max_tokens` or `num_key_value_heads` counts something and is shown.
    """
    name = _TOKENIZER.sub("", key)
    if value is None or isinstance(value, bool | int | float) or _NUMBER.fullmatch(str(value).strip()):
        name = _COUNT.sub("", name)
    return bool(_SECRET.search(name))


def redacted_text(text: str) -> str:
    """Hides the secrets in `text`: user and password of a URI, values of secret keys, known keys."""
    text = _KNOWN.sub(HIDDEN, _USER.sub(f"{HIDDEN}@", text))
    return _PAIR.sub(_hidden_pair, text)


def redacted(value: Any, key: str = "") -> Any:
    """Hides the secrets in the JSON value of `key`, at any depth."""
    if isinstance(value, Mapping):
        return {str(k): redacted(v, str(k)) for k, v in value.items()} if not is_secret(key) else HIDDEN
    if isinstance(value, str):
        return HIDDEN if value and is_secret(key, value) else redacted_text(value)
    if isinstance(value, list | tuple):
        return [redacted(each, key) for each in value]
    return HIDDEN if value is not None and is_secret(key, value) else value


def redacted_override(override: str) -> str:
    """Hides the secrets of a typed `key=value`. A list or mapping with a secret is rewritten as JSON."""
    key, equals, value = override.partition("=")
    if equals and value and is_secret(key, value):
        return f"{key}={HIDDEN}"
    with suppress(yaml.YAMLError, RecursionError):
        given = yaml.safe_load(value)
        if isinstance(given, dict | list) and (shown := redacted(given, key)) != given:
            return f"{key}={json.dumps(shown, default=str)}"
    return f"{redacted_text(key)}{equals}{redacted_text(value)}"


def command_line(program: Iterable[str], config: object, overrides: Iterable[str]) -> str:
    """Returns the command that continues a run, as it is typed in a shell.

    Secrets in it are hidden, so a command with a secret must be completed before it works.
    """
    return shlex.join([*program, redacted_text(str(config)), *map(redacted_override, overrides)])


def _hidden_pair(pair: re.Match[str]) -> str:
    key, between, value = pair.group("key", "is", "value")
    quote = value[0] if value[0] in "\"'" else ""
    inside = value[1:-1] if quote else value
    if inside and is_secret(key, inside):
        return f"{key}{between}{quote}{HIDDEN}{quote}"
    return f"{key}{between}{quote}{_PAIR.sub(_hidden_pair, inside)}{quote}"  # `Failed: https://h/?token=…`
