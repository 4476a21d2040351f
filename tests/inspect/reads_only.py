"""`python -m tests.inspect.reads_only EXAMPLE`: makes hostile runs in the current folder, does to them all
that only reads, and prints what code was run. Each run names the module `evil` somewhere, and `evil.py` lies
wherever it could be found.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import orjson
from typer.exceptions import TyperException

import orchestrator
from orchestrator.data.common import user_code
from orchestrator.errors import OrchestratorError

EVIL = """
import os, pathlib
with (pathlib.Path(__file__).resolve().parent / "PWNED").open("a") as file:
    file.write(f"{os.getpid()}\\n")
def function(*given, **named):
    return given[0] if given else [{"text": "evil"}]
"""
PLACES: dict[str, dict[str, Any]] = {
    "transforms": {"data.transforms": ["evil:function", "runs.transforms.evil:function"]},
    "factory": {"model.factory": "evil:function", "model.config": None},
    "tokenizer": {"data.tokenizer": "tiktoken:evil"},
    "weights": {"model.pretrained": "runs/weights/model", "model.config": None},
    "source": {},
}
HOME = Path.cwd()


def make_runs(example: Path) -> None:
    """The runs, in the current folder."""
    for name, changes in PLACES.items():
        _make(example, HOME / "runs" / name, changes)
    for folder in (HOME, HOME / "runs", HOME / "tiktoken_ext", *(HOME / "runs" / name for name in PLACES)):
        folder.mkdir(exist_ok=True)
        for module in ("evil", "wandb", "mlflow", "trackio", "tiktoken", "sentencepiece"):
            (folder / f"{module}.py").write_text(EVIL)
    model = HOME / "runs" / "weights" / "model"
    model.mkdir()
    auto = {"AutoConfig": "evil.function", "AutoModelForCausalLM": "evil.function"}
    (model / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto}))


def _make(example: Path, run: Path, changes: dict[str, Any]) -> None:
    import shutil

    shutil.copytree(example, run)
    for journal in (run / "journal").rglob("*.jsonl"):
        lines = [orjson.loads(line) for line in journal.read_bytes().splitlines()]
        for fields in lines:
            if fields["kind"] == "attempt":
                fields["config"].update({**changes, "run.storage": "runs", "run.name": run.name})
                if not changes:
                    (source,) = fields["config"]["data.sources"]
                    source.update(path="evil:function", format="python")
        journal.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))


class Ends(threading.Event):
    """A server that ends when its streams have looked a few times."""

    asked = 0

    def is_set(self) -> bool:
        self.asked += 1
        return self.asked > 3


class Watcher:
    """What this process runs, reads and starts, by Python's own audit hook."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._on = False
        sys.addaudithook(self._hook)

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._on = True
        try:
            yield
        finally:
            self._on = False

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._on:
            return
        if event == "exec":
            where = str(getattr(args[0], "co_filename", ""))
        elif event == "open":
            where = str(args[0]) if str(args[0]).endswith((".py", ".pyc", ".so")) else ""
        elif event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec"):
            self.seen.append(f"{event} {args[:1]}")
            return
        else:
            return
        if Path(where).is_relative_to(HOME) or (where.endswith(".py") and not os.path.isabs(where)):
            self.seen.append(f"{event} {where}")


def foreign_modules() -> list[str]:
    """Modules that come neither from Python, nor from an installed package, nor from this checkout."""
    own = Path(orchestrator.__file__).resolve().parents[1]
    known = (Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve(), Path(os.__file__).parent, own)
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    return [n for n, f in files.items() if f and not any(Path(f).resolve().is_relative_to(k) for k in known)]


def ask_every_get() -> list[str]:
    """Every GET route of the page, of every run; the routes."""
    from starlette.testclient import TestClient

    from orchestrator.inspect.dashboard.app import make_app
    from orchestrator.storage.files import Storage

    app = make_app(Storage(str(HOME / "runs")), "t", closing=Ends(), every_s=0.0)
    client = TestClient(app, base_url="http://127.0.0.1", headers={"Authorization": "Bearer t"})
    paths = client.get("/api/openapi.json").json()["paths"]
    gets = [path for path, methods in paths.items() if "get" in methods]
    for name in PLACES:
        points = client.get(f"/api/runs/{name}/points").json()["rows"]
        event = client.get(f"/api/runs/{name}/events?limit=1").json()["rows"][0]["id"]
        for path in gets:
            asked = path.format(run=name, point=points[0]["name"], event=event, number="0", card="groups")
            for query in ("", f"?num_workers=3&point={points[0]['name']}") if "plan" in path else ("",):
                answer = client.get(asked + query)
                assert answer.status_code in {200, 404, 422}, (asked, answer.text)
                assert answer.status_code == 200 or "number" in path or "plan" in path, (asked, answer.text)
    return gets


def read(name: str) -> None:
    """All of a notebook's `Run` that executes nothing, and every command that reads."""
    uri = f"runs/{name}"
    run = orchestrator.open(uri)
    every: list[Callable[[], Any]] = [
        run.list_points, run.tree, run.verify, run.records, lambda: run.status(0), run.goodput, run.findings,
        run.points, run.steps, run.attempts, run.events, run.sources, run.config, lambda: list(run.logs()),
        run.plan, lambda: run.plan(["train.max_steps=30"]), lambda: run.prune(dry_run=True),
        run._repr_html_, lambda: repr(run),
    ]  # fmt: skip
    for each in every:
        attempted(each)
    point = run.list_points()[-1]["name"]
    for words in (
        ["points", uri], ["points", uri, "--tree"], ["points", uri, "--prune", "--dry-run"], ["verify", uri],
        ["status", uri], ["logs", uri], ["pin", uri, point], ["unpin", uri, point],
        ["save", uri, "--no-wait"], ["stop", uri, "--no-wait"], ["rewind", uri, "--to", point, "--yes"],
        ["fork", uri, f"forks/{name}", "--at", point, "--yes"],
    ):  # fmt: skip
        attempted(lambda words=words: command(words))  # type: ignore[misc]


@cache
def program() -> Any:
    """The program `orchestrator`."""
    import typer

    from orchestrator.cli.commands import app

    return typer.main.get_command(app)


def command(words: list[str]) -> None:
    """Calls it in this process."""
    program().main(words, standalone_mode=False)


def attempted(act: Callable[[], Any]) -> None:
    """It may be refused; it may not run code."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        try:
            act()
        except (OrchestratorError, SystemExit, TyperException):
            return


def pwned() -> list[int]:
    """The processes that have imported `evil`."""
    return [int(line) for path in HOME.rglob("PWNED") for line in path.read_text().split()]


def main() -> None:
    """Prints what was found, as JSON."""
    make_runs(Path(sys.argv[1]))
    sys.path += [str(HOME), str(HOME / "runs"), *(str(HOME / "runs" / name) for name in PLACES)]
    watcher, found = Watcher(), dict[str, Any]()
    with watcher.watching():
        found["routes"] = ask_every_get()
        for name in PLACES:
            read(name)
    found |= {"seen": [*watcher.seen], "foreign": foreign_modules(), "pwned": pwned()}
    # these run a run's code, in other processes
    attempted(lambda: command(["audit", "runs/transforms"]))
    attempted(lambda: command(["samples", "runs/source", "--step", "3"]))
    found |= {"audited_here": os.getpid() in pwned(), "foreign_then": foreign_modules()}
    with watcher.watching():  # the planted mistake
        user_code.load("evil:function", "here")
    found |= {"planted_seen": watcher.seen[len(found["seen"]) :], "planted_foreign": foreign_modules()}
    found["planted_pwned"] = os.getpid() in pwned()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
