"""The commands that take weights out of a run, and make them again: `export`, `replay`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.shared import Json, RunUri, app, print_json, print_lines, require_one, say
from orchestrator.history.sentences import count

if TYPE_CHECKING:
    from orchestrator.launch.replay.replay import Replayed


@app.command()
def export(
    run: RunUri,
    where: Annotated[
        list[str],
        typer.Argument(
            metavar="[POINT] OUT",
            help="the folder to make (or a bucket's URI), which comes last; before it a point's name, or "
            "nothing: the newest one",
            show_default=False,
        ),
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", help="float32, bfloat16 or float16; without it numbers are as they were trained"
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Write a point's weights for transformers. The folder has the weights, configuration and tokenizer, and
    AutoModelForCausalLM.from_pretrained opens it; of a model.factory it has plain safetensors.
    """
    from orchestrator.checkpoint.points.points import parse_point_name
    from orchestrator.inspect.run import open_run

    if len(where) > 2:  # noqa: PLR2004
        raise typer.BadParameter(f"give RUN OUT or RUN POINT OUT, not {len(where) + 1} words")
    *before, out = where
    point = before[0] if before else None
    if parse_point_name(out) is not None:
        raise typer.BadParameter(f"{out} is a point's name; the folder to make comes last: RUN POINT OUT")
    document = open_run(run).export(out, point, dtype, say)
    print_json(document) if json else print_lines(export_lines(document))


@app.command()
def replay(
    run: RunUri,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="key=value of cluster, monitor or data.num_tokenizers, e.g. cluster.num_workers=2",
            show_default=False,
        ),
    ] = None,
    step: Annotated[int | None, typer.Option("--step", metavar="N", help="up to this step")] = None,
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
        f"step {found.step:,}: {trained}",
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
    return [
        f"{document['out']}: the weights of {document['point']}, numbers {numbers}, "
        f"{document['bytes'] / 2**20:,.1f} MiB in {len(document['files'])} files",
        f"  weights digest of the point {document['weights_digest']}",
        *(f"  passed over: {Damage(**each)}" for each in document["damages"]),
    ]
