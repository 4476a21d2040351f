"""Makes one frozen `JobConfig` of a YAML file or a mapping, and `key=value` overrides.

An error lists all problems at once. No file except the configuration itself is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from orchestrator.config.between_fields import cross_field_problems
from orchestrator.config.field_rules import field_rules
from orchestrator.config.problems import describe
from orchestrator.config.schema import JobConfig
from orchestrator.config.text import Problem, Reading, apply_overrides, read_mapping, read_yaml
from orchestrator.errors import ConfigError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Loads the YAML file `path`, and applies the overrides `section.field=value`.

    Relative paths stay as written: they are relative to the current directory. Raises `ConfigError` with
    every problem, one per line. Its code is that of the problem, or `config.invalid` for several.
    """
    return _finish(*_read(path), overrides)


def parse_config(mapping: Mapping[str, Any], overrides: Sequence[str] = ()) -> JobConfig:
    """Makes a configuration of a mapping, from Python or from a `config.json`. Otherwise as `load_config`."""
    return _finish(*_read(mapping), overrides)


def as_job(config: JobConfig | Mapping[str, Any] | str | Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Makes a job of itself, a mapping or the path of a YAML file, and applies the overrides."""
    if isinstance(config, str | Path):
        return load_config(config, overrides)
    if isinstance(config, Mapping):
        return parse_config(config, overrides)
    if not isinstance(config, JobConfig):
        raise ConfigError(
            f"a job is given as the path of a YAML file, a mapping or a JobConfig, not as {config!r}",
            code="command.not_a_job",
        )
    return parse_config(config.to_json(), overrides) if overrides else config


def as_data_job(
    config: JobConfig | Mapping[str, Any] | str | Path, overrides: Sequence[str] = ()
) -> JobConfig:
    """As `as_job`, for a program that only reads the data.

    It may leave out `run`, `model`, `train.lr`, and a stop if the data have no end.
    """
    if not isinstance(config, str | Path | Mapping):
        return as_job(config, overrides)
    reading, title = _read(config)
    for section, fields in _UNREAD_BY_DATA.items():
        given = reading.value.setdefault(section, {})
        if isinstance(given, dict) and (section != "model" or not given):
            given |= {name: value for name, value in fields.items() if name not in given}
    return _finish(reading, title, overrides)


# the values of fields that such a program leaves out
_UNREAD_BY_DATA: Mapping[str, Mapping[str, Any]] = {
    "run": {"name": "stream"},
    "model": {"factory": "no:model"},
    "train": {"lr": 1.0, "max_tokens": 1 << 62},
}


def _read(config: Mapping[str, Any] | str | Path) -> tuple[Reading, str]:
    """Reads a mapping or a YAML file. The second value is its name in messages."""
    if isinstance(config, Mapping):
        return read_mapping(config), "configuration"
    try:
        text = Path(config).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{config}: cannot be read: {error.strerror}; give the path of a YAML file",
            code="config.unreadable_file",
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{config}: is not UTF-8 text: {error}; give the path of a YAML file", code="config.not_utf8"
        ) from error
    return read_yaml(text), str(config)


def _finish(reading: Reading, title: str, overrides: Sequence[str]) -> JobConfig:
    """Validates the values. pydantic checks each field, and `between_fields` the rules between them."""
    if isinstance(overrides, str) or not isinstance(overrides, Sequence):
        what = "the text " if isinstance(overrides, str) else ""
        raise ConfigError(
            f'overrides is {what}{overrides!r}; give a list of "key=value", e.g. ["train.lr=3e-4"]',
            code="command.overrides_type",
        )
    if reading.unread:
        raise _refusal(reading, title)
    apply_overrides(reading, overrides)
    config = None
    try:
        # validated as JSON: strict then means exact types, while a list may still become a tuple
        config = JobConfig.model_validate_json(json.dumps(reading.value, allow_nan=False))
    except ValidationError as error:
        named = {problem.path for problem in reading.problems}
        reading.problems += [p for p in describe(error, reading.value, JobConfig) if p.path not in named]
    rules = {rule.path: rule for rule in field_rules()}
    reading.problems += cross_field_problems(reading, {path: rule.default for path, rule in rules.items()})
    if reading.problems or config is None:
        raise _refusal(reading, title)
    return config


def _refusal(reading: Reading, title: str) -> ConfigError:
    """Makes the error that lists all problems. Its code is that of a single one, else `config.invalid`."""
    lines = [_problem_line(problem, reading) for problem in reading.problems]
    one = len(lines) == 1
    heading = f"{title}: {'1 problem' if one else f'{len(lines)} problems'}"
    return ConfigError(
        "\n".join([heading, *(f"  {line}" for line in lines)]),
        code=reading.problems[0].code if one else "config.invalid",
    )


def _problem_line(problem: Problem, reading: Reading) -> str:
    path = ".".join(map(str, problem.path))
    place = reading.place(problem.path)
    text = f"{path} {problem.text}" if path else problem.text
    return f"{text} ({place})" if place and place not in text else text
