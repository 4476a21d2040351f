"""The commands that read a run: `points`, `verify`, `audit`, `samples`, `status` and those that follow it,
and `export` and `replay`, which take weights out of it or make them again.

Only `dashboard` loads a web server.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.shared import Json, RunUri, app, print_json, print_lines, require_one, say
from orchestrator.errors import StorageError
from orchestrator.history.numbered_files import AUDIT, VERIFY, audit_result, verify_result
from orchestrator.history.sentences import count
from orchestrator.text import visible

if TYPE_CHECKING:
    from orchestrator.inspect.run import Run
    from orchestrator.launch.replay.evaluate import Evaluated
    from orchestrator.launch.replay.replay import Replayed

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
    by_loss: Annotated[
        bool,
        typer.Option(
            "--by-loss", help="only those with the highest mean loss, with text (monitor.document_losses)"
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Say which documents a step was trained on. For each sample: the files, lines or rows, and which tokens
    of each document. Recomputed from the files and compared with what the journal says was trained.
    """
    from orchestrator.inspect.run import open_run

    found = open_run(run).list_samples(step, text or by_loss, by_loss)
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
    from orchestrator.inspect.dashboard.app import serve
    from orchestrator.inspect.dashboard.auth import is_loopback

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


@app.command()
def export(
    run: RunUri,
    where: Annotated[
        list[str],
        typer.Argument(
            metavar="[POINT] OUT [KEY=VALUE]...",
            help="the folder to make (or a bucket's URI); before it a point's name, or nothing: the newest "
            "one; after it model.pretrained=FOLDER, if the base has moved",
            show_default=False,
        ),
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", help="float32, bfloat16 or float16; without it numbers are as they were trained"
        ),
    ] = None,
    ema: Annotated[
        bool, typer.Option("--ema", help="the averaged weights of train.ema in place of the weights")
    ] = False,
    merged: Annotated[
        bool, typer.Option("--merged", help="the whole model, with the adapters of model.lora merged into it")
    ] = False,
    json: Json = False,
) -> None:
    """Write a point's weights for transformers. The folder has the weights, configuration and tokenizer, and
    AutoModelForCausalLM.from_pretrained opens it; of a model.factory it has plain safetensors, and of
    model.lora the adapters, which PeftModel.from_pretrained opens.
    """
    from orchestrator.checkpoint.points.model_folders import names_weights
    from orchestrator.checkpoint.points.points import parse_point_name
    from orchestrator.inspect.run import open_run

    overrides = [word for word in where if names_weights(word)]
    where = [word for word in where if word not in overrides]
    if not 1 <= len(where) <= 2:  # noqa: PLR2004
        raise typer.BadParameter(f"give RUN OUT or RUN POINT OUT, not {len(where) + 1} words")
    *before, out = where
    point = before[0] if before else None
    if parse_point_name(out) is not None:
        raise typer.BadParameter(f"{out} is a point's name; the folder to make comes last: RUN POINT OUT")
    document = open_run(run).export(
        out, point, dtype, say, averaged=ema, merged=merged, overrides=overrides
    )
    print_json(document) if json else print_lines(export_lines(document))


@app.command()
def evaluate(
    run: RunUri,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="key=value of eval, e.g. eval.max_samples=1000; also cluster.use_gpu, "
            "train.micro_batch_size, and model.pretrained=FOLDER or model.frozen.NAME.pretrained=FOLDER, if "
            "it has moved",
            show_default=False,
        ),
    ] = None,
    point: Annotated[
        str, typer.Option("--point", metavar="NAME", help="the resume point; without it the newest one")
    ] = "latest",
    json: Json = False,
) -> None:
    """Measure the loss of a point on data that are not trained. It takes the parts of the point's
    configuration (`eval.parts`; without any the hold-out), or those that are given. Works in this process,
    on a GPU if the run uses them and there is one. The run is only read.
    """
    from orchestrator.inspect.run import open_run

    found = open_run(run).evaluate(point, overrides or (), say)
    print_json([asdict(each) for each in found]) if json else print_lines(evaluate_lines(found))


def evaluate_lines(found: Sequence[Evaluated]) -> list[str]:
    """The result for people."""
    lines = []
    for each in found:
        loss = f"loss {_exact(each.loss)}"
        perplexity = "" if each.perplexity is None else f"  perplexity {each.perplexity:,.2f}"
        size = f"{each.targets:,} targets in {count(each.samples, 'sample')}"
        lines.append(f"{each.part} after step {each.step:,} ({each.point}): {loss}{perplexity}  {size}")
        if len(each.per_source) > 1:
            lines += [f"  {name}: loss {_exact(value)}" for name, value in each.per_source.items()]
        lines += [f"  {name}: {_exact(value)}" for name, value in each.metrics.items()]
    return lines


def _exact(value: float | None) -> str:
    """All digits: two values that differ are two texts."""
    return "none" if value is None else repr(value)


@app.command()
def replay(
    run: RunUri,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="key=value of cluster, monitor or data.num_tokenizers, e.g. cluster.num_workers=2; also "
            "model.pretrained=FOLDER or model.frozen.NAME.pretrained=FOLDER, if it has moved",
            show_default=False,
        ),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option("--step", metavar="N", help="up to this step, e.g. 250; attempt 2's step: a2:250"),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", metavar="N", help="up to the last step within so many tokens")
    ] = None,
    to_point: Annotated[
        str | None,
        typer.Option(
            "--to-point", metavar="NEW_RUN", help="make a fork there, with the step as a resume point; on Ray"
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Train up to a step once more and compare. Begins at the newest resume point at or before it, and
    compares losses, data and weights with what the run recorded, to the last bit. One worker, in this
    process; with cluster.* or --to-point a launch on Ray. The run is only read; a fork pins its point there.
    """
    from orchestrator.inspect.run import open_run

    require_one({"--step": step, "--tokens": tokens})
    found = open_run(run).replay(step, tokens=tokens, to_point=to_point, overrides=overrides or (), say=say)
    print_json(found.to_json()) if json else print_lines(replay_lines(found))
    if found.equal is False or found.first_difference is not None:
        raise typer.Exit(1)


def replay_lines(found: Replayed) -> list[str]:
    """The result for people."""
    verdict = {
        True: "equal to what the run recorded",
        False: f"NOT equal: the run recorded {found.expected_digest}",
        None: "the run recorded none at this step (monitor.digest_every_steps does)",
    }[found.equal]
    begin = found.from_point or "the first weights"
    trained = f"trained again from {begin}, {count(found.steps_compared, 'step')}"
    if not found.steps_compared:
        trained = f"{begin} is that state: no step was trained again, so none was compared"
    lines = [
        f"step {found.name}: {trained}",
        f"  weights digest {found.weights_digest}: {verdict}",
    ]
    if found.point is not None:
        lines.append(f"  resume point {found.point} of {found.fork}")
    if found.first_difference is not None:
        first = found.first_difference
        lines.append(f"  first difference: step {first['step']}: {first['reason']}")
    elif found.steps_compared:
        lines.append("  data, loss, gradient norm and learning rate of each step are as recorded, to the bit")
    return [*lines, *(f"  note: {note}" for note in found.notes)]


def export_lines(document: dict[str, Any]) -> list[str]:
    """What was written, for people."""
    from orchestrator.records.points import Damage

    numbers = document["dtype"] or "as trained"
    what = f"{'averaged ' if document['averaged'] else ''}{'merged ' if document['merged'] else ''}weights"
    return [
        f"{document['out']}: the {what} of {document['point']}, numbers {numbers}, "
        f"{document['bytes'] / 2**20:,.1f} MiB in {len(document['files'])} files",
        f"  weights digest of the point {document['weights_digest']}",
        *(f"  passed over: {Damage(**each)}" for each in document["damages"]),
    ]
