"""The commands that train or prepare training: `train`, `plan`, `sample-corpus`."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.shared import (
    INTERRUPTED,
    Config,
    Json,
    Overrides,
    app,
    json_text,
    print_json,
    print_plan,
    say,
)
from orchestrator.launch.process.safe_output import OutputError, output_never_waits, write_result


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
    """Start or continue the run. The same command does both."""
    if dry_run:
        from orchestrator.launch.api import dry_run as rehearse

        print_plan(rehearse(config, overrides or []), json)
        return
    from orchestrator.launch.api import train as start
    from orchestrator.launch.process.stop_signals import told

    try:
        with output_never_waits():
            result = start(config, overrides or [])
    except KeyboardInterrupt as last:  # typer would end without a message
        interrupt = told(last)
        say(str(interrupt) or "interrupted; the same command starts again")
        raise typer.Exit(getattr(interrupt, "exit_code", INTERRUPTED)) from None
    if json:
        try:
            write_result(sys.stdout, json_text(result.to_json()))
        except OutputError as error:  # the run ended as it did
            say(
                f"{error}: the run is {result.outcome}, "
                f"`orchestrator status {shlex.quote(result.run_uri)} --json` reports it, too"
            )
    if result.outcome == "failed":  # the reason was shown when the run ended
        raise typer.Exit(1)


@app.command()
def plan(config: Config, overrides: Overrides = None, json: Json = False) -> None:
    """Say what `train` would do. Needs no Ray, torch or GPU, and writes nothing."""
    from orchestrator.launch.api import plan as look_ahead

    print_plan(look_ahead(config, overrides or []), json)


@app.command("sample-corpus")
def sample_corpus(
    out: Annotated[Path, typer.Argument(help="folder to make")],
    source: Annotated[
        Path | None,
        typer.Option("--from", help="folder of text files; the Python standard library without it"),
    ] = None,
    json: Json = False,
) -> None:
    """Make a small corpus and a tokenizer. They are of text on this machine: jsonl files, and a byte-level
    BPE of 8,192 tokens.
    """
    from orchestrator.data.sample_corpus import build_sample_corpus

    report = build_sample_corpus(out, source)
    print_json(asdict(report)) if json else say(str(report))
