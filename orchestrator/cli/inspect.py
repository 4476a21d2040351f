"""The commands that read a run: `points`, `verify`, `audit`, `samples`, `status` and those that follow it.

Only `dashboard` loads a web server.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.shared import Json, RunUri, app, print_json, print_lines, say
from orchestrator.errors import StorageError
from orchestrator.history.finding_files import AUDIT, VERIFY, audit_result, verify_result
from orchestrator.text import visible

if TYPE_CHECKING:
    from orchestrator.inspect.run import Run


def leave_finding(run: Run, what: str, result: dict[str, Any], seconds: float) -> None:
    """Stores the result for later readers. If this process may not write there, it reports that and
    continues.
    """
    try:
        run.note_finding(what, result, seconds)
    except StorageError as error:
        say(f"note: the result is not left in the run's folder for others to see: {error}")


@app.command()
def points(
    run: RunUri,
    prune: Annotated[
        bool,
        typer.Option("--prune", help="delete orphans and what retention lets go, but nothing that is pinned"),
    ] = False,
    tree: Annotated[
        bool, typer.Option("--tree", help="show them with the attempts that made them, rewinds and forks")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="with --prune: only say what it would do")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="read every byte of each and compare the digests")
    ] = False,
    json: Json = False,
) -> None:
    """List the run's resume points. Shows where each stands, whether it belongs to the history, whether it is
    pinned, and whether its files have their sizes (with --verify: their digests).
    """
    from orchestrator.inspect.run import open_run

    if prune and (tree or verify):
        raise typer.BadParameter("give --prune alone, or --tree and --verify")
    if prune:
        from orchestrator.cli.tables import pruned_lines

        opened = open_run(run)
        pruned = opened.prune(dry_run)
        opened.left_of_replays(say, remove=not dry_run)
        if json:
            print_json([asdict(each) for each in pruned])
        else:
            print_lines(pruned_lines(pruned))
        return
    if dry_run:
        raise typer.BadParameter("--dry-run goes with --prune")
    opened = open_run(run)
    if verify:
        from orchestrator.cli.progress import show_verify_progress

        with show_verify_progress() as progress:
            rows = opened.list_points(verify=True, progress=progress)
    else:
        rows = opened.list_points()
    if json:
        print_json(rows)
    elif tree:
        print_lines(opened.tree(rows))
    else:
        from orchestrator.cli.tables import points_lines

        print_lines(points_lines(rows))
    opened.left_of_replays(say)
    if any(row["healthy"] is False for row in rows):
        raise typer.Exit(1)


@app.command()
def verify(
    run: RunUri,
    point: Annotated[str | None, typer.Argument(help="a point's name; all without it")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on where a verification of all points was interrupted")
    ] = False,
    json: Json = False,
) -> None:
    """Compare every byte of the resume points. Names each file whose digest differs."""
    from orchestrator.cli.progress import show_verify_progress
    from orchestrator.inspect.run import open_run

    if resume and point is not None:
        raise typer.BadParameter("--resume continues with all points; leave the point out")
    opened, began = open_run(run), time.monotonic()
    with show_verify_progress() as progress:
        rows = opened.verify(point, resume=resume, progress=progress)
    if rows:
        result = verify_result(rows, every=point is None)
        leave_finding(opened, VERIFY, result, time.monotonic() - began)
    if json:
        print_json(rows)
    else:
        from orchestrator.cli.tables import verify_lines

        print_lines(verify_lines(rows))
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
    processes: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="work in so many processes; default: as many as there are cores, fewer for a short run",
            show_default=False,
        ),
    ] = None,
    reference: Annotated[
        bool,
        typer.Option(
            "--reference", help="also encode each document with tokenizers, and name those that differ (slow)"
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Prove what the run was trained on. Recomputes the token stream from the files and compares it, step by
    step, with what the journal says was trained.
    """
    from orchestrator.cli.progress import show_audit_progress
    from orchestrator.inspect.run import open_run

    opened, began = open_run(run), time.monotonic()
    with show_audit_progress(quiet=json) as progress:
        report = opened.audit(steps, processes, reference, progress)
    leave_finding(opened, AUDIT, audit_result(report), time.monotonic() - began)
    if json:
        print_json(report)
    else:
        from orchestrator.cli.tables import audit_lines

        print_lines(audit_lines(report))
    differ = report["reference"] is not None and report["reference"]["documents_not_journalled"]
    if report["first_difference"] is not None or differ:
        raise typer.Exit(1)


@app.command()
def samples(
    run: RunUri,
    step: Annotated[
        str,
        typer.Option(metavar="N", help="the step, e.g. 250; attempt 2's step: a2:250", show_default=False),
    ],
    text: Annotated[bool, typer.Option("--text", help="also show the documents' tokens as text")] = False,
    json: Json = False,
) -> None:
    """Say which documents a step was trained on. For each sample: the files, lines or rows, and which tokens
    of each document. Recomputed from the files and compared with what the journal says was trained.
    """
    from orchestrator.inspect.run import open_run

    found = open_run(run).list_samples(step, text)
    if json:
        print_json(found)
    else:
        from orchestrator.cli.tables import samples_lines

        print_lines(samples_lines(found))
    if not found["matches"]:
        raise typer.Exit(1)


@app.command()
def status(
    run: RunUri,
    json: Json = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="again and again, until the run has ended; --json: a line each")
    ] = False,
) -> None:
    """Say whether the run is alive. Also where it stands, how many workers it has, what went wrong last, and
    when it will be done. Reads storage only.
    """
    from orchestrator.inspect.run import open_run

    opened = open_run(run)
    for seen in opened.looks() if watch else [opened.status()]:
        if json:
            print_json(seen.to_json(), lines=watch)
        else:
            from orchestrator.inspect.status.view import status_lines

            if watch and sys.stdout.isatty():
                sys.stdout.write("\x1b[H\x1b[J")  # replaces the look before it
            print_lines(status_lines(seen))
    if seen.is_broken:
        raise typer.Exit(1)


@app.command()
def watch(run: RunUri, json: Json = False) -> None:
    """Show where the run stands until it ends. The same as `status --watch`. --json: a line each time."""
    from orchestrator.inspect.frames import show
    from orchestrator.inspect.run import open_run

    opened = open_run(run)
    if json:
        for seen in opened.looks():
            print_json(seen.to_json(), lines=True)
    else:
        seen = show(opened.looks())
    if seen.is_broken:
        raise typer.Exit(1)


@app.command()
def logs(
    run: RunUri,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="go on as it grows, until the run has ended")
    ] = False,
) -> None:
    """Print the newest log file of the run. It has what a launch said, and what Ray said at length."""
    from orchestrator.inspect.run import open_run

    for text in open_run(run).logs(follow):
        sys.stdout.write(visible(text))
        sys.stdout.flush()


@app.command()
def dashboard(
    storage: Annotated[
        str, typer.Argument(help="the folder, or bucket's URI, in which runs lie, or one run's own")
    ],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free")] = 0,
    host: Annotated[
        str,
        typer.Option(
            "--host", help="address to listen on; another than this machine's own is reached by others"
        ),
    ] = "127.0.0.1",
    json: Json = False,
    open_page: Annotated[bool, typer.Option("--open", help="open the page in a browser")] = False,
    until_eof: Annotated[bool, typer.Option("--until-eof", hidden=True)] = False,
) -> None:
    """Serve a page that shows and steers runs. Prints its link. Shows every run of a folder, alive or not."""
    from orchestrator.inspect.dashboard.auth import is_loopback
    from orchestrator.inspect.dashboard.serve import serve

    if not is_loopback(host):
        say(
            f"warning: other machines reach {host}, and connections to it are not encrypted: anyone who has "
            "the link or can read the traffic can stop runs; an ssh tunnel works without --host"
        )

    def announce(link: str) -> None:
        print_json({"link": link}) if json else print_lines([link])
        if open_page:
            import webbrowser

            webbrowser.open(link)

    serve(storage, host, port, announce, until_eof)
