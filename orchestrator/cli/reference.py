"""Generates docs/reference.md from the code: all commands and all public names of the package.

Commands have their arguments, options and exit codes. `python -m orchestrator.cli.reference` prints the
document; a test compares it with the file.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import orchestrator
from orchestrator.cli.commands import app
from orchestrator.cli.shared import exit_codes

HEAD = """\
# Reference

Generated from the code: `python -m orchestrator.cli.reference > docs/reference.md`.
A job's fields are in [configuration.md](configuration.md),
the JSON documents in [json-output.md](json-output.md).
"""


def reference() -> str:
    """The whole document."""
    return "\n".join([HEAD, "## Commands\n", *_commands(), "## Python\n", *_names()])


# ------------------------------------------------------------------------------------- commands
def _commands() -> Iterator[str]:
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
        yield f"### orchestrator {name}\n"
        yield f"`{' '.join([f'orchestrator {name}', *map(_usage, arguments), '[OPTIONS]'])}`\n"
        yield _text(command.help) + "\n"
        if examples := re.findall(r"^  (orchestrator .*)$", command.epilog or "", re.MULTILINE):
            yield "\n".join(["```", *examples, "```\n"])
        rows = [(_usage(p), p) for p in arguments] + [(", ".join(_spelled(p)), p) for p in options]
        yield "| argument or option | meaning |\n|---|---|"
        yield from (f"| `{word}` | {_cell(p)} |" for word, p in rows)
        yield ""
        codes = "; ".join(f"{code}: {what}" for code, what in exit_codes(name).items())
        yield f"Exit codes: {codes}.\n"


def _usage(argument: Any) -> str:
    word = argument.metavar or argument.name.upper()
    many = "..." if argument.nargs < 0 and not argument.metavar else ""
    return f"{word}{many}" if argument.required or word.startswith("[") else f"[{word}{many}]"


def _spelled(option: Any) -> list[str]:
    if option.is_flag:
        return list(option.opts)
    words = {int: "N", float: "NUMBER", Path: "FOLDER"}
    kind = option.metavar or words.get(option.type_descriptor.annotation, "TEXT")
    return [f"{opt} {kind}".replace("|", "\\|") for opt in option.opts]


def _cell(parameter: Any) -> str:
    text = (parameter.help or "").replace("|", "\\|").replace("\n", " ")
    shown = isinstance(parameter.default, int | float | str) and not getattr(parameter, "is_flag", False)
    return f"{text} (default: `{parameter.default}`)" if shown and parameter.default != "" else text


# ------------------------------------------------------------------------------------- the package
def _names() -> Iterator[str]:
    for name in sorted(orchestrator.__all__, key=lambda n: (inspect.isclass(getattr(orchestrator, n)), n)):
        thing = getattr(orchestrator, name)
        yield f"### orchestrator.{name}\n"
        if not inspect.isclass(thing):
            yield f"`{name}{_signature(thing)}`\n"
        yield _text(thing.__doc__) + "\n"
        if inspect.isclass(thing):
            yield from _members(thing)


def _members(kind: type) -> Iterator[str]:
    own = [(name, value) for name, value in vars(kind).items() if not name.startswith("_")]
    fields = getattr(kind, "__dataclass_fields__", {}) or getattr(kind, "model_fields", {})
    if fields:
        yield "| field | type |\n|---|---|"
        yield from (f"| `{field}` | `{_annotation(kind, field)}` |" for field in fields)
        yield ""
    for name, value in own:
        if inspect.isfunction(value):
            yield f"- `{name}{_signature(value)}`: {_line(inspect.getdoc(value))}"
        elif isinstance(value, property):
            yield f"- `{name}`: {_line(inspect.getdoc(value))}"
    yield ""


def _annotation(kind: type, field: str) -> str:
    return str(inspect.get_annotations(kind).get(field, "")).replace("|", "\\|")


def _signature(function: Any) -> str:
    """The call of a function: without `self`, and `…` for a default that is no plain value."""
    signature, words = inspect.signature(function), []
    for name, parameter in signature.parameters.items():
        if name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        plain = parameter.default is None or isinstance(parameter.default, int | float | str | tuple)
        default = repr(parameter.default) if plain else "…"
        given = "" if parameter.default is parameter.empty else f" = {default}"
        words.append(f"{name}: {parameter.annotation}{given}")
    return f"({', '.join(words)}) -> {signature.return_annotation}"


def _text(docstring: str | None) -> str:
    """One line for each paragraph."""
    assert docstring, "a public name has a docstring"
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(docstring.replace("\b", "")))
    return "\n\n".join(" ".join(line.strip() for line in part.splitlines()) for part in paragraphs)


def _line(docstring: str | None) -> str:
    return _text(docstring).replace("\n\n", " ")


if __name__ == "__main__":
    sys.stdout.write(reference())
