"""The commands that start training or prepare it: `train`, `plan`, `sample-corpus`, `submit`, `doctor`."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.shared import (
    INTERRUPTED,
    Config,
    Json,
    Overrides,
    app,
    json_text,
    print_json,
    print_lines,
    print_plan,
    say,
)
from orchestrator.launch.process.safe_output import OutputError, output_never_waits, write_result
from orchestrator.text import visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.cluster.job_server import JobServer
    from orchestrator.launch.doctor.storage_check import Check
    from orchestrator.launch.submit import Submitted


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
                f"`orchestrator status {shlex.quote(result.run_uri)} --json` reports that as well"
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


@app.command()
def submit(
    config: Config,
    overrides: Overrides = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="http://HOST:8265",
            help="the job server of the cluster's head; without it $RAY_API_SERVER_ADDRESS, or this machine",
        ),
    ] = None,
    python: Annotated[
        str, typer.Option("--python", help="the Python of the head that has the dependencies")
    ] = "python",
    stop_wait: Annotated[
        int, typer.Option("--stop-wait", metavar="SECONDS", min=1, help="what a stopped job has to save")
    ] = 60,
    entrypoint_cpus: Annotated[
        float,
        typer.Option(
            "--entrypoint-cpus", min=0, help="CPUs that the driver takes; with 0 it runs on the head"
        ),
    ] = 0.0,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="submit, and do not wait for the end")] = False,
    json: Json = False,
) -> None:
    """Start or continue the run as a Ray job. It gets a copy of the current folder. What it prints is shown
    until it ends; Ctrl-C leaves it running.
    """
    import secrets

    from orchestrator.cluster.job_server import JobServer
    from orchestrator.launch import submit as submitting

    made = submitting.submission(
        config,
        overrides or [],
        folder=Path.cwd(),
        token=secrets.token_hex(4),
        python=python,
        stop_wait_s=stop_wait,
        entrypoint_cpus=entrypoint_cpus,
    )
    server = JobServer(address)
    found = submitting.submit(made, server)
    if not (json and no_wait):
        say("\n".join(submitting.commands(found)))
    if not no_wait:
        _show_to_the_end(server, found)
        found = submitting.submitted(made, server)
    if json:
        print_json(found.to_json())
    else:
        because = f": {found.message}" if found.message else ""
        ended = f"job {found.job}: {found.status.lower()}{because}"
        print_lines([found.job if no_wait else ended])
    if found.status == "FAILED":
        raise typer.Exit(2 if found.exit_code == 2 else 1)


def _show_to_the_end(server: JobServer, job: Submitted) -> None:
    """Shows what the job prints, until it has ended. Ctrl-C leaves it running."""
    import asyncio

    try:
        asyncio.run(_show(server, job.job))
    except KeyboardInterrupt:
        uri = shlex.quote(job.run_uri)
        say(f"job {job.job} keeps running; `orchestrator stop {uri}` saves and stops it")
        raise typer.Exit(INTERRUPTED) from None


async def _show(server: JobServer, job: str) -> None:
    import asyncio

    async for text in server.output(job):
        sys.stderr.write(visible(text))
        sys.stderr.flush()
    while not server.status(job).is_over:
        await asyncio.sleep(1.0)


@app.command()
def doctor(
    storage: Annotated[str, typer.Argument(help="the folder or bucket of runs, as run.storage")] = "./runs",
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:6379|http://HOST:8265", help="also a cluster: its GCS, or its job server"),
    ] = None,
    json: Json = False,
) -> None:
    """Look for what would stop or spoil a run. Checks versions, Ray's token and health checks, storage,
    clock, shared memory, open files, CPUs, memory, GPUs. Says what to set, and why. Run it on every machine.
    """
    from orchestrator.launch.doctor import diagnosis as judge
    from orchestrator.launch.doctor.facts import collect

    checks = judge.diagnose(collect(storage, address))
    state = judge.worst(checks)
    if json:
        print_json({"state": state, "checks": [check.to_json() for check in checks]})
    else:
        print_lines(check_lines(checks))
    if state == "bad":
        raise typer.Exit(1)


def check_lines(checks: Sequence[Check]) -> list[str]:
    """A line for each check, another one for what to do, and the number of checks in each state."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        limit = f"  ({check.limit})" if check.limit else ""
        lines.append(f"{check.state:<4}  {check.name:<{width}}  {check.value}{limit}")
        lines += [f"{'':<4}  {'':<{width}}  -> {check.advice}"] if check.advice else []
    counts = {state: sum(check.state == state for check in checks) for state in ("bad", "warn", "ok")}
    return [*lines, ", ".join(f"{number} {state}" for state, number in counts.items() if number)]
