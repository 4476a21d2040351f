"""The commands that take weights out of a run: `export`. Nothing is decided here."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from orchestrator.cli.shared import Json, RunUri, app, print_json, print_lines


@app.command()
def export(
    run: RunUri,
    where: Annotated[
        list[str],
        typer.Argument(
            metavar="[POINT] OUT",
            help="a point's name (without it the newest), and the folder to make",
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
    """Write a resume point's weights, configuration and tokenizer as a folder that
    transformers.AutoModelForCausalLM.from_pretrained opens; of a model.factory plain safetensors.

    Example: orchestrator export runs/quickstart ./my-model --dtype bfloat16
    """
    from orchestrator.monitor.run import open_run

    if len(where) > 2:  # noqa: PLR2004
        raise typer.BadParameter(f"give RUN [POINT] OUT, not {len(where) + 1} words")
    point, out = (where[0], where[1]) if len(where) > 1 else (None, where[0])
    document = open_run(run).export(out, point, dtype)
    print_json(document) if json else print_lines(export_lines(document))


def export_lines(document: dict[str, Any]) -> list[str]:
    """What was written, for people."""
    numbers = document["dtype"] or "as trained"
    return [
        f"{document['out']}: the weights of {document['point']}, numbers {numbers}, "
        f"{document['bytes'] / 2**20:,.1f} MiB in {len(document['files'])} files",
        f"  weights digest of the point {document['weights_digest']}",
    ]
