"""The command `doctor`: what a machine, its storage and a cluster lack for a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.shared import Json, app, print_json, print_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.launch.doctor.check import Check


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
