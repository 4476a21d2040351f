"""Whatever README and docs/ claim is run, compared with what generates it, or looked for in the sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest

import orchestrator
from orchestrator.checkpoint.export.export_files import Exported
from orchestrator.checkpoint.node_local.node_folder import Node
from orchestrator.checkpoint.points.pins import Hold
from orchestrator.checkpoint.points.points import Commit
from orchestrator.checkpoint.points.run_file import RunFile
from orchestrator.cli.commands import app, main
from orchestrator.cli.reference import reference
from orchestrator.cluster.ray_state import NO_ERROR
from orchestrator.config.field_rules import resume_table
from orchestrator.config.loading import load_config
from orchestrator.coordinator.machine.requests import RequestAnswer
from orchestrator.data.frozen import DataRecord
from orchestrator.history import sentences
from orchestrator.history.claims.claim_files import AttemptEnd
from orchestrator.history.claims.claims import Claim, ClaimParent, ForkedFrom, GenerationStart, Origin
from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.metrics.declared import metrics_table
from orchestrator.history.numbered_files import Finding, Request, audit_result, verify_result
from orchestrator.inspect.frames import columns_table
from orchestrator.inspect.status.view import RunView
from orchestrator.launch.process.progress import Progress
from orchestrator.planning.encoders import EncoderChoice, EncoderSpan
from orchestrator.planning.resume.identity import Difference, RunIdentity
from orchestrator.planning.resume.skipping import Skip, SkipRequest
from orchestrator.planning.resume.source_lists import ListSpan, RestartRequest, SourceLists
from orchestrator.planning.schedule import Budgets, Length
from orchestrator.records.cursor import Cursor, MixtureShare, SourceCursor
from orchestrator.records.points import FileEntry, NodeParts, NodePlace
from orchestrator.records.run_status import GroupChange, GroupMember, Held, Loss, Stall
from orchestrator.records.steps import StateKey, StepRecord
from tests.elastic.builders import status
from tests.parsed import parsed
from tests.small_configs import JOBS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text()
PATHS = sorted((ROOT / "docs").rglob("*.md"))
DOCS = {path.relative_to(ROOT / "docs").as_posix(): path.read_text() for path in PATHS}
COMMANDS, OUTPUT = DOCS["commands.md"], DOCS["json-output.md"]
RULES = {"data": DOCS["data.md"], "membership": DOCS["membership.md"]}


def between(text: str, begin: str, end: str) -> str:
    return text.partition(f"<!-- {begin} -->")[2].partition(f"<!-- {end} -->")[0].strip()


# the name belongs to somebody else in the public index
_STRANGERS = re.compile(r"\borchestrator\[|install(?:[ \n]+-\S+)*[ \n]+[\"']*orchestrator\b(?!\.)")


def test_nothing_tells_anybody_to_install_a_package_of_that_name_from_an_index() -> None:
    folders = [ROOT / name for name in ("docs", "configs", "jobs", "benchmarks", "orchestrator")]
    files = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile"]
    kinds = (".md", ".py", ".ipynb", ".yaml", ".txt", ".js", ".html")
    files += [path for folder in folders for path in folder.rglob("*") if path.suffix in kinds]
    assert len(files) > 400
    assert [path for path in files if _STRANGERS.search(path.read_text(encoding="utf-8"))] == []
    for text in ("pip install 'orchestrator[remote]'", "pip install -U orchestrator", "f'orchestrator[{x}]'"):
        assert _STRANGERS.search(text)
    assert not _STRANGERS.search("pip install -e '.[remote]' in the checkout; orchestrator doctor")


def test_the_resume_table_is_the_generated_one() -> None:
    table = between(
        CONFIGURATION, "resume table: python -m orchestrator.config.field_rules", "end of resume table"
    )
    assert table == resume_table().strip()


def test_the_table_of_metrics_is_the_generated_one() -> None:
    title = "metrics: python -m orchestrator.history.metrics.declared"
    assert between(DOCS["metrics.md"], title, "end of metrics") == metrics_table()


def test_the_columns_of_the_tables_are_the_declared_ones() -> None:
    table = between(
        DOCS["notebooks.md"], "columns: orchestrator.inspect.frames:columns_table", "end of columns"
    )
    assert table == columns_table()


def test_the_reference_is_the_generated_one() -> None:
    assert DOCS["reference.md"] == reference(), "python -m orchestrator.cli.reference > docs/reference.md"


def test_the_reference_has_every_command_and_every_public_name() -> None:
    text = DOCS["reference.md"]
    assert set(re.findall(r"^### orchestrator ([a-z-]+)$", text, re.MULTILINE)) == {
        command.name or command.callback.__name__
        for command in app.registered_commands
        if command.callback is not None
    }
    assert set(re.findall(r"^### orchestrator\.(\w+)$", text, re.MULTILINE)) == set(orchestrator.__all__)


# ------------------------------------------------------------------------------------- names in docs/
def source_of(module: str) -> Path:
    path = ROOT / Path(*module.split("."))
    return path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"


def names_in(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """What the statements define: functions, classes, constants and fields."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for name in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(name, ast.Name):
                        yield name.id, node


def is_defined(path: Path, dotted: str) -> bool:
    """Whether the file defines `function`, `Class` or `Class.method`."""
    if not path.is_file():
        return False
    body = parsed(path).body
    for part in dotted.split("."):
        found = dict(names_in(body)).get(part)
        if found is None:
            return False
        body = found.body if isinstance(found, ast.ClassDef) else []
    return True


def code_names(text: str) -> set[tuple[str, str]]:
    return set(re.findall(r"`(orchestrator(?:\.\w+)*):([\w.]+)`", text))


def test_names(text: str) -> set[tuple[str, str]]:
    return set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text))


test_names.__test__ = False  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", DOCS)
def test_every_function_and_every_test_that_a_document_names_exists(name: str) -> None:
    text = DOCS[name]
    gone = [f"{m}:{n}" for m, n in code_names(text) if not is_defined(source_of(m), n)]
    gone += [f"{f}::{n}" for f, n in test_names(text) if not is_defined(ROOT / f, n)]
    assert not gone
    # a name that is written in another way would not be looked for
    assert len(re.findall(r"`(?:orchestrator[.\w]*:|tests/[\w/]+\.py::)", text)) == sum(
        len(re.findall(pattern, text))
        for pattern in (r"`orchestrator(?:\.\w+)*:[\w.]+`", r"`tests/[\w/]+\.py::\w+`")
    )


def test_a_name_that_is_gone_is_found() -> None:
    here = ROOT / "tests" / "test_docs.py"
    assert is_defined(here, "is_defined")
    assert is_defined(source_of("orchestrator.storage.files"), "Storage.create")
    assert is_defined(source_of("orchestrator.storage.tries"), "TRIES")
    assert not is_defined(source_of("orchestrator.storage.files"), "Storage.rename")
    assert not is_defined(source_of("orchestrator.storage.files"), "create")
    assert not is_defined(source_of("orchestrator.no_such_module"), "Storage")


def rows(text: str, title: str) -> list[list[str]]:
    """The cells of the table that begins with the column `title`."""
    lines = text.split(f"\n| {title} |")[1].splitlines()[2:]
    kept = lines[: next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in kept]


@pytest.mark.parametrize("name", RULES)
def test_every_rule_says_where_it_lives_and_how_it_is_tested_or_that_it_is_planned(name: str) -> None:
    text = RULES[name]
    stated = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    table = {row[0]: row[1:] for row in rows(text, "rule")}
    assert list(stated) == list(table) == [str(number + 1) for number in range(len(table))]
    for number, (code, tests) in table.items():
        if code == "planned":
            assert tests == "planned"
            assert stated[number].startswith("*Planned:*")
        else:
            assert code_names(code), number
            assert test_names(tests), number


def test_every_rule_that_the_code_cites_exists() -> None:
    paths = [*(ROOT / "orchestrator").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    cited = {
        (name, int(number))
        for path in paths
        for name, numbers in re.findall(
            r"\b(data|membership)\s+rules?\s+(\d+(?:(?:,| to| and)\s+\d+)*)", path.read_text()
        )
        for number in re.findall(r"\d+", numbers)
    }
    stated = {
        (name, int(number))
        for name, text in RULES.items()
        for number in re.findall(r"^(\d+)\. ", text, re.MULTILINE)
    }
    assert len(cited) > 20
    assert cited <= stated


@pytest.mark.parametrize("path", [ROOT / "README.md", *PATHS], ids=lambda p: p.name)
def test_every_link_leads_to_a_file_and_a_heading(path: Path) -> None:
    for target, heading in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", path.read_text()):
        there = (path.parent / target) if target else path
        assert there.is_file(), target
        headings = [
            re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-")
            for h in re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
        ]
        assert not heading or heading in headings, f"{target}#{heading}"


def test_the_readme_links_every_document() -> None:
    assert {name for name in DOCS if f"(docs/{name})" in README} == set(DOCS)


# ------------------------------------------------------------------------------------- the journal's kinds
def journalled() -> Iterator[tuple[str, EventKind, set[str] | None]]:
    """Where the code journals an event, of which kind, and the fields where they are written out there."""
    for path in (ROOT / "orchestrator").rglob("*.py"):
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            keywords = {k.arg: k.value for k in node.keywords}
            if re.search(r"journal\.event$|self\._note$", called):
                kind, names = node.args[0], None if None in keywords else {str(k) for k in keywords}
            elif called == "Note" or called.endswith(".note.remote"):
                kind, given = keywords.values() if called == "Note" else node.args
                names = None
                if isinstance(given, ast.Dict):
                    names = {k.value for k in given.keys if isinstance(k, ast.Constant)}
            else:
                continue
            if ast.unparse(kind) in ("kind", "action.kind"):  # what a function passes on
                continue
            assert ast.unparse(kind).startswith("EventKind."), ast.unparse(node)
            yield f"{path.name}:{node.lineno}", EventKind[ast.unparse(kind).split(".")[1]], names


def test_every_event_that_the_code_journals_has_the_fields_of_its_kind() -> None:
    written = list(journalled())
    wrong = [where for where, kind, names in written if names is not None and names != kind.fields]
    assert wrong == []
    # the fields of a value of its own are not written out
    values = {EventKind.GROUP_FORMED, EventKind.REQUEST_ANSWERED}
    assert {kind for _, kind, names in written if names is None} == values
    assert {field.name for field in fields(RequestAnswer)} == EventKind.REQUEST_ANSWERED.fields
    assert {kind for _, kind, _ in written} == set(EventKind)


def test_the_table_of_journal_kinds_is_that_of_the_code() -> None:
    table = {
        row[0].strip("`"): re.findall(r"`(\w+)`", row[1]) for row in rows(DOCS["storage-format.md"], "kind")
    }
    for kind, record in {"step": StepRecord, "generation": GenerationStart}.items():
        assert table.pop(kind) == [field.name for field in fields(record)]
    assert table["group formed"] == [field.name for field in fields(GroupChange)]
    assert {kind: set(names) for kind, names in table.items()} == {kind: kind.fields for kind in EventKind}


WORKER = GroupMember(rank=1, host="10.0.0.7", pid=23633)
LOST = GroupChange(
    attempt=1,
    generation=2,
    world_size=1,
    wanted=2,
    step=18,
    step_before=18,
    lost=(Loss(worker=WORKER, reason=NO_ERROR),),
    joined=(),
    paused_s=0.2,
    reason="",
    restarted=False,
)
NEW = replace(WORKER, pid=24020)
SAID = {
    "ready": [
        sentences.group_change(
            replace(LOST, world_size=2, step=0, step_before=0, lost=(), joined=(NEW,), paused_s=None)
        )
    ],
    "lost": [sentences.group_change(LOST)],
    "joined": [
        sentences.group_change(
            replace(LOST, world_size=2, step=42, step_before=42, lost=(), joined=(NEW,), paused_s=0.1)
        )
    ],
    "frozen": sentences.stall(
        Stall(quiet_s=5.2, median_s=0.1, held=(Held(worker=WORKER, state="T"), Held(worker=NEW, state="S")))
    ),
}


@pytest.mark.parametrize("event", SAID)
def test_the_sample_of_the_output_has_the_sentences_that_a_run_says(event: str) -> None:
    (line,) = SAID[event]
    if event == "frozen":  # the document leaves out the end of this one
        line = line.split(" · ")[0]
    assert line in README + COMMANDS


def test_the_sample_of_the_output_has_the_line_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    step = status(13).last_step
    assert step is not None
    step = replace(step, loss=7.0073, data_wait_s=0.003, lr=0.002)
    progress = Progress(0.0)
    progress._wanted, progress._total = 2, 150
    progress.show(status(12))
    progress.show(status(13, last_step=step))
    progress.close()
    shown = capsys.readouterr().err.splitlines()[-1].split(maxsplit=2)[2]
    line, replaced = re.subn(r"[\d,]+ tokens/s", "3,017 tokens/s", shown)
    assert replaced == 1
    assert line in README


def test_the_keys_of_a_status_are_those_of_the_value() -> None:
    (row,) = [line for line in OUTPUT.splitlines() if line.startswith("| `status` | object |")]
    assert re.findall(r"`(\w+)`", row)[1:] == list(RunView.__slots__)


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_every_config_is_valid(path: Path) -> None:
    assert load_config(path).run.name


SHOWN = sorted(set(re.findall(r"^orchestrator ([a-z-]+)", README + COMMANDS, re.MULTILINE)))


@pytest.mark.parametrize("command", SHOWN)
def test_every_command_of_the_documents_exists(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert command in capsys.readouterr().out


def test_the_two_commands_stand_by_line_20_and_every_make_target_exists() -> None:
    head = "\n".join(README.splitlines()[:20])
    assert "make quickstart" in head
    assert "make test" in head
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z]+)", README)) - {"it"} <= targets


def test_git_ignores_every_folder_that_the_documents_write_beside_the_code() -> None:
    written = set(re.findall(r"(?<=[ :])\./([\w-]+)", COMMANDS + CONFIGURATION))
    assert {"runs", "corpus", "my-model"} <= written
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {name for name in written if f"/{name}/" not in ignored} == set()


def test_ci_calls_the_test_command_of_the_readme() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text()


# ------------------------------------------------------------------------------------- limits and fields
def test_the_limits_are_the_constants_of_the_code() -> None:
    num_compared = 0
    for what, limit, _, where in rows(DOCS["guarantees.md"], "what"):
        ((module, name),) = code_names(where)
        if not name.isupper() or name == "PHASE_LIMITS_S":
            continue
        node = dict(names_in(parsed(source_of(module)).body))[name]
        assert isinstance(node, ast.Assign)
        assert f"{ast.literal_eval(node.value):g}" in re.findall(r"[\d.]+", limit), what
        num_compared += 1
    assert num_compared >= 12


FIELDS = {
    "run.json": (RunFile, RunIdentity, ForkedFrom),
    "manifest/data.json": (DataRecord,),
    "attempts/0003.json": (Claim,),
    "attempts/0003.parent.json": (
        ClaimParent,
        Budgets,
        Length,
        Difference,
        EncoderSpan,
        EncoderChoice,
        Origin,
        ForkedFrom,
        Skip,
        SkipRequest,
        SourceLists,
        ListSpan,
        RestartRequest,
    ),
    "attempts/0003.end.json": (AttemptEnd,),
    "pins/<point>.json": (Hold,),
    "requests/<launch>/000001.json": (Request,),
    "findings/000001.json": (Finding,),
    "points/…/COMMIT": (Commit, StateKey, FileEntry, NodeParts, NodePlace),
    "<node_folder>/node.json": (Node,),
    "exports/…/EXPORT": (Exported, FileEntry),
    "points/…/cursor.json": (Cursor, SourceCursor, MixtureShare),
}


AUDIT_ROW = next(row for row in OUTPUT.splitlines() if row.startswith("| `audit` |"))
REPORT = dict.fromkeys(re.findall(r"`(\w+)`", AUDIT_ROW))
RESULTS = {  # of fields that hold a document
    "findings/000001.json": {
        *audit_result(REPORT),
        *verify_result([], every=True),
        *verify_result([{"name": "", "healthy": True}], every=True)["points"][0],
    }
}


@pytest.mark.parametrize("file", FIELDS)
def test_the_fields_of_a_stored_file_are_those_of_its_value(file: str) -> None:
    (stated,) = [row[1] for row in rows(DOCS["storage-format.md"], "file") if row[0] == f"`{file}`"]
    own = {"format"} if file == "points/…/cursor.json" else RESULTS.get(file, set())  # no field of its value
    stored = {field.name for kind in FIELDS[file] for field in fields(kind)} | own
    assert set(re.findall(r"`(\w+)`", stated)) == stored


# private words of earlier texts; each marks a sentence to write anew
FORBIDDEN = (
    "whoever", "goes on", "is told", "are told", "stands there", "at the least", "by turns",
    "comes to nothing", "hears of", "heeded",
)  # fmt: skip


@pytest.mark.parametrize("word", FORBIDDEN)
def test_no_text_of_the_package_or_its_documents_has_a_private_word(word: str) -> None:
    texts = [*(ROOT / "orchestrator").rglob("*.py"), ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in texts
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(rf"\b{word}\b", line)
    ]
    assert not found
