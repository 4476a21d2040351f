"""The commands: they parse arguments, call `run`, print for people or one JSON document, and set the exit
code.

Nothing is decided here. Exit codes: 0 done, 1 failure, 2 bad configuration or refusal, 130 interrupted. Logs
and errors go to stderr.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from orchestrator import __version__
from orchestrator.cluster.connection import leaving_ray_behind
from orchestrator.errors import OrchestratorError
from orchestrator.launch.screen import Screen, let_go

if TYPE_CHECKING:
    from orchestrator.monitor.asking import Reply
    from orchestrator.planning.resume_plan import ResumePlan

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Elastic LLM training on Ray: a run survives anything and continues at exactly the next unread "
    "token.",
)

Config = Annotated[str, typer.Argument(help="YAML file of the job, e.g. configs/quickstart.yaml")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="key=value, e.g. train.global_batch_size=24", show_default=False)
]
RunUri = Annotated[str, typer.Argument(help="the run's folder or URI, e.g. runs/quickstart")]
Json = Annotated[
    bool, typer.Option("--json", help="print one JSON document on stdout and nothing else there")
]


INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def _show_version(wanted: bool) -> None:
    if wanted:
        others = ", ".join(f"{name} {_version_of(name)}" for name in ("ray", "torch"))
        sys.stdout.write(f"orchestrator {__version__} ({others}, Python {platform.python_version()})\n")
        raise typer.Exit


def _version_of(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="print the versions and exit"),
    ] = False,
) -> None:
    """See the commands."""
    del version  # the callback has acted on it


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="look at all that needs no cluster (plan, model, disk), write nothing, and end"
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Start the run, or continue it where it stands; the same command does both."""
    if dry_run:
        from orchestrator.launch.api import dry_run as rehearse

        _print_plan(rehearse(config, overrides or []), json)
        return
    from orchestrator.launch.api import train as start

    try:
        result = start(config, overrides or [])
    except KeyboardInterrupt as interrupt:  # typer would end without a message
        _say(str(interrupt) or "interrupted; the same command starts again")
        raise typer.Exit(getattr(interrupt, "exit_code", INTERRUPTED)) from None
    if json:
        try:
            _print_json(result.to_json())
        except (OSError, ValueError) as error:  # the run has ended as it has, whoever reads that
            _say(
                f"cannot write the result to stdout ({error}); the run is {result.outcome}, and "
                f"`orchestrator status {result.run_uri} --json` says so, too"
            )
    if result.outcome == "failed":  # the reason was shown when the run ended
        raise typer.Exit(1)


@app.command()
def plan(config: Config, overrides: Overrides = None, json: Json = False) -> None:
    """Say what `train` would do with this configuration, without Ray, torch or a GPU."""
    from orchestrator.launch.api import plan as look_ahead

    _print_plan(look_ahead(config, overrides or []), json)


@app.command()
def points(
    run: RunUri,
    prune: Annotated[
        bool, typer.Option("--prune", help="delete the orphans: points off the history, unless pinned")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="with --prune: only say what it would do")
    ] = False,
    json: Json = False,
) -> None:
    """List the run's resume points: where each stands, whether it is whole, whether it belongs to the
    history, and whether it is pinned.
    """
    from orchestrator.monitor.run import open_run

    if prune:
        from orchestrator.cli.tables import pruned_lines

        pruned = open_run(run).prune(dry_run)
        if json:
            _print_json([asdict(each) for each in pruned])
        else:
            _print_lines(pruned_lines(pruned))
        return
    if dry_run:
        raise typer.BadParameter("--dry-run goes with --prune")
    rows = open_run(run).points()
    if json:
        _print_json(rows)
    else:
        from orchestrator.cli.tables import points_lines

        _print_lines(points_lines(rows))
    if not all(row["healthy"] for row in rows):
        raise typer.Exit(1)


@app.command()
def verify(
    run: RunUri,
    point: Annotated[str | None, typer.Argument(help="a point's name; all without it")] = None,
    json: Json = False,
) -> None:
    """Read every byte of the resume points and compare the digests; names each damaged file."""
    from orchestrator.monitor.run import open_run

    rows = open_run(run).verify(point)
    if json:
        _print_json(rows)
    else:
        from orchestrator.cli.tables import verify_lines

        _print_lines(verify_lines(rows))
    if not all(row["healthy"] for row in rows):
        raise typer.Exit(1)


@app.command()
def audit(
    run: RunUri,
    steps: Annotated[
        str | None,
        typer.Option(
            metavar="A:B",
            help="only these steps, both included, e.g. 100:250, 100: or 7; attempt 2's step: a2:7",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Recompute the token stream from the files and compare it, step by step, with what the journal says was
    trained.
    """
    from orchestrator.monitor.run import open_run

    report = open_run(run).audit(steps)
    if json:
        _print_json(report)
    else:
        from orchestrator.cli.tables import audit_lines

        _print_lines(audit_lines(report))
    if report["first_difference"] is not None:
        raise typer.Exit(1)


@app.command()
def status(
    run: RunUri,
    json: Json = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="again and again, until the run has ended; --json: a line each")
    ] = False,
) -> None:
    """Say whether the run is alive, where it stands, how many workers it has, what went wrong last, and when
    it will be done. Reads storage only.
    """
    from orchestrator.monitor.run import open_run

    opened = open_run(run)
    for seen in opened.watch() if watch else [opened.status()]:
        if json:
            _print_json(seen.to_json(), lines=watch)
        else:
            from orchestrator.cli.tables import status_lines

            if watch and sys.stdout.isatty():
                sys.stdout.write("\x1b[H\x1b[J")  # in place of the look before it
            _print_lines(status_lines(seen))
    if seen.is_broken:
        raise typer.Exit(1)


PointName = Annotated[str, typer.Argument(help="a point's name, e.g. 00000480-a0003-g0007")]


@app.command()
def pin(
    run: RunUri,
    point: PointName,
    why: Annotated[str, typer.Option("--why", help="for whoever finds the pin")] = "",
    json: Json = False,
) -> None:
    """Keep a resume point: neither retention nor --prune deletes it until it is unpinned."""
    from orchestrator.monitor.run import open_run

    hold = open_run(run).pin(point, why)
    _print_json(asdict(hold)) if json else _print_lines([f"{point} is pinned by {hold.by}"])


@app.command()
def unpin(run: RunUri, point: PointName, json: Json = False) -> None:
    """Give a pin back: the point may be deleted again."""
    from orchestrator.monitor.run import open_run

    hold = open_run(run).unpin(point)
    _print_json(asdict(hold)) if json else _print_lines([f"{point} is no longer pinned"])


NoWait = Annotated[bool, typer.Option("--no-wait", help="ask, and do not wait for the answer")]


@app.command()
def save(run: RunUri, no_wait: NoWait = False, json: Json = False) -> None:
    """Ask the running launch for a resume point now; it trains on. Works from any machine that sees the run's
    storage.
    """
    from orchestrator.monitor.run import open_run

    _print_reply(open_run(run).save(wait=not no_wait), json)


@app.command()
def stop(
    run: RunUri,
    now: Annotated[
        bool, typer.Option("--now", help="without saving: steps after the newest resume point are lost")
    ] = False,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Ask the running launch to save and stop; the command that started it continues it later. Works from any
    machine that sees the run's storage.
    """
    from orchestrator.monitor.run import open_run

    _print_reply(open_run(run).stop(now, wait=not no_wait), json)


@app.command("sample-corpus")
def sample_corpus(
    out: Annotated[Path, typer.Argument(help="folder to make")],
    source: Annotated[
        Path | None,
        typer.Option("--from", help="folder of text files; the Python standard library without it"),
    ] = None,
) -> None:
    """Make a real corpus (jsonl) and an 8k byte-level BPE tokenizer from text that is on this machine."""
    from orchestrator.data.sample_corpus import build_sample_corpus

    _say(str(build_sample_corpus(out, source)))


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point: runs the command (default: that of the process) and ends the process with its exit
    code.

    An error of ours is printed to stderr without a traceback. A standard stream that is closed early changes
    no exit code that a command has.
    """
    with leaving_ray_behind():
        try:
            app(args=arguments)
        except OrchestratorError as error:
            _say(f"{type(error).__name__}: {error}")
            sys.exit(error.exit_code)
        finally:
            for stream in (sys.stdout, sys.stderr):
                let_go(stream)


def _print_plan(found: ResumePlan, json: bool) -> None:
    """For people, or as JSON; a refusal ends with 2."""
    if json:
        _print_json(found.to_json())
    else:
        from orchestrator.cli.tables import plan_lines

        _print_lines(plan_lines(found))
    if found.action == "refuse":
        raise typer.Exit(2)


def _print_reply(reply: Reply, json: bool) -> None:
    if json:
        _print_json(reply.to_json())
    else:
        _print_lines([f"{reply.what}: {reply.text}"])
    if reply.outcome in ("refused", "failed"):
        raise typer.Exit(2 if reply.outcome == "refused" else 1)


def _print_json(value: Any, lines: bool = False) -> None:
    if not sys.stdout:
        raise OSError("the command was started without it")
    sys.stdout.write(orjson.dumps(value, option=0 if lines else orjson.OPT_INDENT_2).decode() + "\n")
    sys.stdout.flush()


def _print_lines(lines: list[str]) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def _say(text: str) -> None:
    Screen(sys.stderr).write(text + "\n")


if __name__ == "__main__":
    main()
