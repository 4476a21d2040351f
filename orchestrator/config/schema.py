"""The configuration of a job: one frozen `JobConfig`, and the sections about its launch.

A field is in the section of the stage that reads it, and declares what a resume may do with it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from orchestrator.config.sections import (
    NAME,
    DataConfig,
    ModelConfig,
    PackConfig,
    Section,
    SourceConfig,
    TrainConfig,
    free,
    may_change,
    same,
)


class RunConfig(Section):
    """What the run is called and where it lives."""

    name: Annotated[str, same("letters, digits, `.`, `_`, `-`, not starting with `.`", pattern=NAME)]
    """Name of the run; with the storage it is the run's identity."""
    storage: Annotated[str, free("a path or URI", min_length=1)] = "./runs"
    """Folder or URI that holds runs; the run lies in `<storage>/<name>`."""

    @property
    def run_uri(self) -> str:
        """`<storage>/<name>`, as commands take it."""
        storage = self.storage if self.storage.endswith("://") else self.storage.rstrip("/")
        return f"{storage}/{self.name}"


class ClusterConfig(Section):
    """How many workers, on what."""

    num_workers: Annotated[
        Annotated[int, Field(ge=1)] | tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]],
        free("a whole number >= 1, or [min, max]"),
    ] = 1
    """Workers; while some are missing the run continues with the others. Or [min, max]: starts with min
    workers, scales to max as nodes join, waits below min.
    """
    use_gpu: Annotated[bool, free("true or false")] = False
    """One GPU per worker."""
    address: Annotated[
        str | None,
        free(
            "null, auto, or host:port of a Ray cluster",
            pattern=r"^(auto|(\[[0-9A-Fa-f:]+\]|[^\s:/]+):[0-9]{1,5})$",
        ),
    ] = None
    """Ray cluster to join; null: the one that a Ray job runs in, else a new local one."""
    wait_s: Annotated[float, free("a number >= 0, in seconds", ge=0)] = 600.0
    """How long the run waits below the minimum of workers before it stops, in seconds."""
    max_failures: Annotated[int, free("a whole number >= 0", ge=0)] = 3
    """Failures without a finished step between them before the run stops."""
    cpus_per_worker: Annotated[int, free("a whole number >= 1", ge=1)] = 1
    """Logical CPUs that a worker takes."""

    @property
    def min_workers(self) -> int:
        """The fewest workers that may train: one, unless a minimum is given."""
        return 1 if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def start_workers(self) -> int:
        """The fewest workers that must fit on the cluster when the run starts."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def max_workers(self) -> int:
        """The number of workers that is aimed at."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]


class ResumeConfig(Section):
    """When to save, what to keep, where to go on."""

    every_steps: Annotated[int | None, free("a whole number >= 1, or null", ge=1)] = 50
    """Save a resume point every so many steps; null: not by steps."""
    every_minutes: Annotated[float | None, free("a number > 0, or null", gt=0)] = None
    """Save a resume point every so many minutes; null: not by time."""
    memory_every_steps: Annotated[
        Literal["auto"] | Annotated[int, Field(ge=1)] | None, free("auto, a whole number >= 1, or null")
    ] = "auto"
    """Each worker copies its part of the state in memory every so many steps, and a neighbour keeps another
    copy: a lost worker costs at most the steps since. `auto`: 10 where workers hold parts of the state, else
    null; null: none, and a lost part costs the steps since the last point.
    """
    keep_latest: Annotated[int, free("a whole number >= 1", ge=1)] = 3
    """Resume points that are kept."""
    keep_every: Annotated[int | None, free("a whole number >= 1, or null", ge=1)] = None
    """Also keep each point whose step is a multiple of this; null: none for that."""
    keep_best: Annotated[int, free("a whole number >= 0", ge=0)] = 0
    """Also keep so many points with the lowest loss (`keep_best_by`)."""
    keep_best_by: Annotated[
        str,
        free("loss, or eval.PART.loss", pattern=r"^(loss|eval\.[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}\.loss)$"),
    ] = "loss"
    """Whose loss `keep_best` compares: `loss`: the mean of the steps since the point before;
    `eval.PART.loss`: that of a part that was evaluated at the point.
    """
    export_every: Annotated[int | None, free("a whole number >= 1, or null", ge=1)] = None
    """The weights of every so many-th point are copied to `exports/`, for transformers; null: none."""
    node_folder: Annotated[
        str | None, free("null, or an absolute path, also with ~ or $NAME", pattern=r"^(/|~|\$)")
    ] = None
    """Each worker's part of a point is written into this folder of its own node's disk, with a copy on
    another node, not to `run.storage`; `~` and `$NAME` are what they are on each node. null: to
    `run.storage`.
    """
    data: Annotated[Literal["continue", "restart", "skip"], may_change("continue, restart or skip")] = (
        "continue"
    )
    """`continue`: exactly at the next unread token. `restart`: all sources from the start of their files as
    they are now, once. `skip`: leave out `skip_steps` or `skip_samples` after the point, once; either number
    alone means that, too.
    """
    restart_sources: Annotated[tuple[str, ...], may_change("a list of names of sources")] = ()
    """These sources alone from the start of their files as they are now, once."""
    skip_steps: Annotated[int | None, may_change("a whole number >= 1, or null", ge=1)] = None
    """Samples of so many steps are left out after the point, at its own batch size and seq_len."""
    skip_samples: Annotated[int | None, may_change("a whole number >= 1, or null", ge=1)] = None
    """So many samples are left out after the point, at its own seq_len."""
    from_: Annotated[
        str,
        may_change(
            "latest, or a point's name such as 00000480-a0003-g0007, or the folder of another run's point "
            "such as runs/other/points/00000480-a0003-g0007",
            alias="from",
            pattern=r"^(latest|(.*/)?[0-9]{8,}-a[0-9]{4,}-g[0-9]{4,}/?)$",
        ),
    ] = "latest"
    """Point to resume from: `latest`, or a name; an older one rewinds the run. The folder of another run's
    point begins a new run with it (a fork)."""
    optimizer: Annotated[Literal["keep", "reset"], may_change("keep or reset")] = "keep"
    """`reset`: where the job has another optimizer than the point, its state begins anew; `keep`: such a
    resume is refused.
    """
    accept_changed: Annotated[bool, may_change("true or false")] = False
    """Go on although files of the sources have changed."""


HOLDOUT = "holdout"  # the part that is evaluated if none is named


class EvalPartConfig(Section):
    """One part of `eval.parts`; exactly one of `holdout`, `sources`."""

    holdout: Literal[True] | None = None
    """What `data.holdout` holds out."""
    sources: Annotated[tuple[SourceConfig, ...], Field(min_length=1)] | None = None
    """Sources, as in `data.sources`, each read once."""


class EvalConfig(Section):
    """When the loss of data that are not trained is measured, and on which (docs/howto/evaluation.md)."""

    every_steps: Annotated[int | None, may_change("a whole number >= 1, or null", ge=1)] = None
    """Evaluate after every so many steps; null: not by steps."""
    every_tokens: Annotated[int | None, may_change("a whole number >= 1, or null", ge=1)] = None
    """Evaluate after the step that reaches a multiple of so many tokens; null: not by tokens."""
    at_end: Annotated[bool, may_change("true or false")] = False
    """Evaluate the last state, too."""
    parts: Annotated[
        dict[Annotated[str, Field(pattern=NAME)], EvalPartConfig],
        may_change("a mapping of names to {holdout: true} or {sources: [...]}"),
    ] = Field(default_factory=dict)
    """What is evaluated; empty: the part `holdout`, if `data.holdout` holds something out."""
    max_samples: Annotated[int | None, may_change("a whole number >= 1, or null", ge=1)] = None
    """Evaluate only the first so many samples of each part; null: all."""

    @property
    def is_wanted(self) -> bool:
        """Whether a run evaluates anything."""
        return self.every_steps is not None or self.every_tokens is not None or self.at_end

    @property
    def part_names(self) -> tuple[str, ...]:
        """The names of the parts."""
        return tuple(self.parts) or (HOLDOUT,)


class MonitorConfig(Section):
    """What is shown while it runs."""

    progress_s: Annotated[float, free("a number > 0, in seconds", gt=0)] = 5.0
    """Time between two lines of progress, in seconds."""
    digest_every_steps: Annotated[int | None, free("a whole number >= 1, or null", ge=1)] = None
    """Journal the digest of the weights every so many steps, for `replay`; null: only points have it."""
    document_losses: Annotated[int | None, free("a whole number from 1 to 100, or null", ge=1, le=100)] = None
    """Journal so many documents of each step with the highest mean loss (`samples --by-loss`); null: none."""
    dashboard: Annotated[bool, free("true or false")] = False
    """Serve the run's page beside it, on the driver's machine, and print its link."""
    tensorboard: Annotated[bool, free("true or false")] = True
    """Metrics of each step for TensorBoard, over consumed tokens, in the run's `logs/tensorboard/`."""
    loggers: Annotated[
        tuple[Literal["wandb", "mlflow", "trackio"], ...], free("a list of wandb, mlflow and trackio")
    ] = ()
    """Loggers that get the steps that resume points hold, too: `wandb`, `mlflow`, `trackio`; each is an extra
    of the same name (docs/metrics.md).
    """


class JobConfig(Section):
    """A whole job, valid and frozen. Made by `load_config` or `parse_config`; pickles."""

    run: RunConfig
    data: DataConfig
    pack: PackConfig
    model: ModelConfig
    train: TrainConfig
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    resume: ResumeConfig = Field(default_factory=ResumeConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    monitor: MonitorConfig = Field(default_factory=MonitorConfig)

    @property
    def sample_len(self) -> int:
        """The positions of a sample: `pack.seq_len` for each of its rows."""
        return self.data.rows_per_sample * self.pack.seq_len

    def to_json(self) -> dict[str, Any]:
        """Sections and fields as plain JSON values; `parse_config` of it gives an equal configuration."""
        return self.model_dump(mode="json")

    def flat(self) -> dict[str, Any]:
        """Dotted path of every field (`train.lr`, `resume.from`) to its JSON value, in declared order."""
        return {f"{s}.{f}": value for s, fields in self.to_json().items() for f, value in fields.items()}
