"""Lists the sentences of the package for people, read from the sources: its errors and its other messages.

`python -m tests.messages > docs/errors.md` writes the errors with their codes and classes,
`python -m tests.messages notices > docs/notices.md` the lines that commands, workers and the coordinator
print or log. `tests/test_errors.py` compares both. They are the place in which a changed sentence shows.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import orchestrator
from tests.parsed import parsed

PACKAGE = Path(orchestrator.__file__).parent
BASE, REASON = "OrchestratorError", "BadContentError"  # of the errors; of the reasons for bad documents
PASSED_ON = "(that of its cause)"
SENTENCES = "history/sentences.py"  # every text in it is for people
PRINTS = {"say", "_say", "tell", "warn", "_warn", "warning", "info", "print"}
_WORDS = re.compile(r"[A-Za-z]{2,}[^A-Za-z]+[A-Za-z]{2,}")
FORM = re.compile(r"[a-z_]+\.[a-z][a-z0-9_]*")


@dataclass(frozen=True, order=True)
class Message:
    """One place that makes an error. `text` has the expressions of its f-string in braces."""

    code: str
    kind: str
    text: str
    place: str


def sources() -> dict[Path, ast.Module]:
    return {path: parsed(path) for path in sorted(PACKAGE.rglob("*.py"))}


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


@cache
def of_interest(tree: ast.Module) -> list[ast.AST]:
    """Classes, imports and calls, in one pass: the pass over all nodes takes most of the time."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.ImportFrom | ast.Call)]


def error_classes(
    nodes: dict[Path, list[ast.AST]], trees: dict[Path, ast.Module], root: str
) -> dict[str, str | None]:
    """The code of each class below `root`, its own or inherited. None: its errors have one each."""
    bases: dict[str, list[str]] = {}
    own: dict[str, ast.expr] = {}
    for of_file in nodes.values():
        for node in of_file:
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [_name(base) for base in node.bases]
                for line in node.body if node.name != root else ():
                    if isinstance(line, ast.Assign) and _name(line.targets[0]) == "code":
                        own[node.name] = line.value
    values = constants(trees.values())

    def code(name: str) -> str | None:
        if name in own:
            return _code(own[name], values, {})
        return next((found for base in bases.get(name, ()) if (found := code(base))), None)

    def ours(name: str) -> bool:
        return name == root or any(map(ours, bases.get(name, ())))

    return {name: code(name) for name in bases if ours(name)}


def constants(trees: Iterable[ast.Module]) -> dict[str, str]:
    """The texts of module constants that look like codes, by name. A name with several texts is left out."""
    found: dict[str, set[str]] = {}
    for node in (node for tree in trees for node in tree.body if isinstance(node, ast.Assign)):
        target, value = node.targets[0], node.value
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=True))
        for name, text in pairs:
            if isinstance(text, ast.Constant) and isinstance(text.value, str) and FORM.fullmatch(text.value):
                found.setdefault(_name(name), set()).add(text.value)
    return {name: next(iter(texts)) for name, texts in found.items() if len(texts) == 1}


def imported(nodes: list[ast.AST], trees: dict[Path, ast.Module]) -> dict[str, str]:
    """The constants that a module imports from others."""
    found: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("orchestrator."):
            path = PACKAGE.joinpath(*node.module.split(".")[1:]).with_suffix(".py")
            if path in trees:
                theirs = constants([trees[path]])
                names = [each for each in node.names if each.name in theirs]
                found |= {each.asname or each.name: theirs[each.name] for each in names}
    return found


def _code(node: ast.expr, values: dict[str, str], classes: dict[str, str | None]) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in classes:
        return classes[node.value.id] or PASSED_ON
    return values.get(_name(node), PASSED_ON)


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            "{" + ast.unparse(part.value) + "}" if isinstance(part, ast.FormattedValue) else _text(part)
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return "{" + ast.unparse(node) + "}"


@cache
def messages(root: str = BASE) -> tuple[Message, ...]:
    """Every construction of an error of ours, or of another exception below `root`."""
    return tuple(_messages(root))


def _messages(root: str) -> Iterator[Message]:
    trees = sources()
    nodes = {path: of_interest(tree) for path, tree in trees.items()}
    classes, everywhere = error_classes(nodes, trees, root), constants(trees.values())
    for path, tree in trees.items():
        values = everywhere | imported(nodes[path], trees) | constants([tree])
        for node in nodes[path]:
            if isinstance(node, ast.Call) and _name(node.func) in classes:
                kind = _name(node.func)
                given = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
                code = _code(given[0], values, classes) if given else classes[kind]
                text = " ".join((_text(node.args[0]) if node.args else "").split())
                yield Message(code or "", kind, text, str(path.relative_to(PACKAGE)))


def table() -> str:
    """The document: a row for each code, class and sentence."""
    lines = [
        "# Errors",
        "",
        "Every error has a code that never changes. `--json` and Python have it at `error.code`, the page at "
        "`code`. Sentences may change. `{…}` is a value. An error that only adds a place to another "
        "one has that one's code; these are the last rows.",
        "",
        "Generated from the code: `python -m tests.messages > docs/errors.md`.",
        "",
        *_rows(messages()),
        "",
        "## Reasons for bad documents",
        "",
        "Why a record is no document, or a chat cannot be rendered. `BadDocumentError` has the code at "
        "`error.reason_code`; its text contains the sentence.",
        "",
        *_rows(messages(REASON)),
    ]
    return "\n".join(lines) + "\n"


def _rows(of: Iterable[Message]) -> list[str]:
    cell = lambda text: text.replace("|", "\\|")  # noqa: E731
    rows = sorted(set(of), key=lambda row: (row.code == PASSED_ON, row))
    shown = dict.fromkeys((row.code, row.kind, row.text) for row in rows)
    table = [f"| `{code}` | {kind} | `` {cell(text)} `` |" for code, kind, text in shown]
    return ["| code | class | sentence |", "|---|---|---|", *table]


def notices() -> list[str]:
    """The texts that are printed, logged or recorded for people and are no errors. Sorted, each once."""
    found = set[str]()
    for path, tree in sources().items():
        if str(path.relative_to(PACKAGE)) == SENTENCES:
            texts = list(_texts_of_functions(tree))
        else:
            calls = [node for node in of_interest(tree) if isinstance(node, ast.Call)]
            texts = [node.args[0] for node in calls if _name(node.func) in PRINTS and node.args]
        found |= {" ".join(_text(text).split()) for each in texts for text in _alternatives(each)}
    return sorted(text for text in found if _WORDS.search(re.sub(r"{[^}]*}", "", text)))


def _texts_of_functions(tree: ast.AST) -> Iterator[ast.expr]:
    """The texts in functions, without docstrings and without the parts of an f-string."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.JoinedStr | ast.Constant):
            yield node
        elif not isinstance(node, ast.Expr | ast.Assign) or not isinstance(tree, ast.Module):
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            yield from () if docstring else _texts_of_functions(node)


def _alternatives(node: ast.expr) -> list[ast.expr]:
    """The texts between which a conditional expression chooses."""
    if isinstance(node, ast.IfExp):
        return [*_alternatives(node.body), *_alternatives(node.orelse)]
    return [node] if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) else []


def notice_table() -> str:
    """The document: a line for each sentence."""
    lines = [
        "# Notices",
        "",
        "The sentences that are no errors: what commands print, what the workers and the coordinator report. "
        "Sentences may change. `{…}` is a value. [errors.md](errors.md) lists the errors.",
        "",
        "Generated from the code: `python -m tests.messages notices > docs/notices.md`.",
        "",
        *(f"- `` {text} ``" for text in notices()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(notice_table() if sys.argv[1:] == ["notices"] else table(), end="")
