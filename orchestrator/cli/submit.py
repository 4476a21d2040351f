"""The command `submit`: a run as a job of a Ray cluster."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.shared import INTERRUPTED, Config, Json, Overrides, app, print_json, print_lines, say
from orchestrator.terminal_text import visible

if TYPE_CHECKING:
    from orchestrator.cluster.job_server import JobServer
    from orchestrator.launch.jobs.submit import Submitted


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
    from orchestrator.launch.jobs import submit as submitting

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
        say(f"job {job.job} runs on; `orchestrator stop {uri}` saves and stops it")
        raise typer.Exit(INTERRUPTED) from None


async def _show(server: JobServer, job: str) -> None:
    import asyncio

    async for text in server.output(job):
        sys.stderr.write(visible(text))
        sys.stderr.flush()
    while not server.status(job).is_over:
        await asyncio.sleep(1.0)
