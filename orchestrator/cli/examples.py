"""One or two examples for each command, as `--help` shows them, in the order of the commands' list."""

from __future__ import annotations

import typer

EXAMPLES: dict[str, tuple[str, ...]] = {
    "sample-corpus": ("corpus/", "corpus/ --from texts/"),
    "doctor": ("runs", "/data/runs --address http://head:8265"),
    "train": (
        "configs/quickstart.yaml",
        "configs/quickstart.yaml train.global_batch_size=24 pack.seq_len=128",
    ),
    "plan": ("configs/quickstart.yaml train.global_batch_size=24",),
    "submit": ("configs/quickstart.yaml run.storage=/data/runs --address http://head:8265",),
    "status": ("runs/quickstart", "runs/quickstart --json"),
    "watch": ("runs/quickstart",),
    "logs": ("runs/quickstart --follow",),
    "dashboard": ("runs --open",),
    "save": ("runs/quickstart",),
    "stop": ("runs/quickstart",),
    "points": ("runs/quickstart", "runs/quickstart --prune --dry-run"),
    "pin": ('runs/quickstart 00000100-a0001-g0001 --why "before the loss spike"',),
    "unpin": ("runs/quickstart 00000100-a0001-g0001",),
    "verify": ("runs/quickstart", "runs/quickstart --resume"),
    "audit": (
        "runs/quickstart",
        "runs/quickstart --steps 100:250",
        "runs/quickstart --processes 8 --reference",
    ),
    "samples": ("runs/quickstart --step 120", "runs/quickstart --step 120 --text"),
    "rewind": ("runs/quickstart --to 00000100-a0001-g0001", "runs/quickstart --step 120 --yes"),
    "fork": (
        "runs/quickstart runs/higher-lr --at latest",
        "runs/quickstart runs/higher-lr --step 120 --yes",
    ),
    "replay": (
        "runs/quickstart --step 120",
        "runs/quickstart --step 120 --to-point runs/at-120 cluster.num_workers=2",
    ),
    "export": (
        "runs/quickstart ./my-model",
        "runs/quickstart 00000100-a0001-g0001 ./my-model --dtype bfloat16",
    ),
}


def add_examples(app: typer.Typer) -> None:
    """Adds the examples to the help of each command, and sets the order of the commands' list."""
    order = list(EXAMPLES)
    for command in app.registered_commands:
        name = name_of(command)
        lines = [f"  orchestrator {name} {example}" for example in EXAMPLES.get(name, ())]
        if lines:
            command.epilog = "\n".join(["\b", "Examples:" if len(lines) > 1 else "Example:", *lines])
    app.registered_commands.sort(
        key=lambda c: order.index(name_of(c)) if name_of(c) in EXAMPLES else len(order)
    )


def name_of(command: typer.models.CommandInfo) -> str:
    """The command's name as it is typed."""
    assert command.callback is not None, "a command is a function"
    return command.name or command.callback.__name__.replace("_", "-")
