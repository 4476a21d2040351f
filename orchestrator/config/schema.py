"""The configuration of a job: one frozen `JobConfig` from YAML and `key=value` overrides, all problems at
once.

A field stands in the section of the stage that reads it and declares what a resume may do with it; it knows
no stage, and reads no file but the configuration itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from orchestrator.config.problems import cross_field_problems, describe
from orchestrator.config.text import Problem, Reading, apply_overrides, read_mapping, read_yaml
from orchestrator.errors import ConfigError

Rule = Literal["same", "may_change", "free"]

FormatName = Literal[
    "jsonl",
    "lines",
    "text",
    "parquet",
    "csv",
    "tsv",
    "arrow",
    "hf_dataset",
    "webdataset",
    "mds",
    "cbor",
    "python",
]
FORMAT_NAMES: tuple[str, ...] = get_args(FormatName)

# The text of a token, never a word that may be meant for true or false.
TokenText = Annotated[str, Field(pattern="[^A-Za-z]")]

# A function of a module.
FUNCTION = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
FunctionName = Annotated[str, Field(pattern=FUNCTION)]

NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}$"


def _declare(rule: Rule, expected: str, constraints: dict[str, Any]) -> Any:
    return Field(json_schema_extra={"resume": rule, "expected": expected}, **constraints)


def same(expected: str, **constraints: Any) -> Any:
    """A field that a resume must find unchanged. `expected` ends the sentence "expected …" in error texts."""
    return _declare("same", expected, constraints)


def may_change(expected: str, **constraints: Any) -> Any:
    """A field that a resume may find changed; training goes on with the new value and says so."""
    return _declare("may_change", expected, constraints)


def free(expected: str, **constraints: Any) -> Any:
    """A field that has no influence on what is trained."""
    return _declare("free", expected, constraints)


def _one_of(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        serialize_by_alias=True,
        defer_build=True,  # who only reads a run parses no configuration
    )


class RunConfig(_Section):
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


class SourceConfig(_Section):
    """One entry of `data.sources`."""

    name: Annotated[str, same("letters, digits, `.`, `_`, `-`, not starting with `.`", pattern=NAME)]
    """Name of the source; part of the order's key."""
    path: Annotated[str | tuple[str, ...], same("a path or glob, or a list of them", min_length=1)]
    """File, folder or glob, or a list of them, relative to the current directory; of format `python` the
    `package.module:function` that returns the records.
    """
    format: Annotated[FormatName, same(_one_of(FORMAT_NAMES))]
    """What the files are: a document is a record, in `lines` a line, in `text` a file; `python`: no files."""
    content: Annotated[Literal["text", "chat", "prompt"], same("text, chat or prompt")] = "text"
    """What a record holds: a text, the messages of a chat, or a prompt with its completion."""
    text_field: Annotated[str, same("the name of a field", min_length=1)] = "text"
    """Field that holds the text; dots lead into a record's inner fields (`meta.body`)."""
    messages_field: Annotated[str, same("the name of a field", min_length=1)] = "messages"
    """Field that holds the list of messages (`content: chat`)."""
    prompt_field: Annotated[str, same("the name of a field", min_length=1)] = "prompt"
    """Field that holds what is given (`content: prompt`)."""
    completion_field: Annotated[str, same("the name of a field", min_length=1)] = "completion"
    """Field that holds what is to follow (`content: prompt`)."""
    loss: Annotated[Literal["assistant", "last", "all"], same("assistant, last or all")] = "assistant"
    """What is learnt of a chat (of a prompt with its completion): the assistant's turns (the completion), the
    last of them, or all.
    """
    weight: Annotated[float | None, may_change("a number > 0, or null", gt=0)] = None
    """Share in the mixture of several sources; null for all: by the sources' bytes."""
    max_epochs: Annotated[int | None, may_change("a whole number >= 1, or null", ge=1)] = None
    """Passes over this source; null: `data.num_epochs`."""
    transforms: Annotated[
        tuple[FunctionName, ...] | None, same("a list of package.module:function, or null")
    ] = None
    """Functions between its records and their tokens; null: `data.transforms`, a list takes their place."""
    transform_fields: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        AfterValidator(lambda names: tuple(sorted(names))),  # written in any order they are the same
        same("a list of names of fields"),
    ] = ()
    """Further fields of its records that its transforms see; dots lead into inner ones (`meta.lang`)."""
    holdout: Annotated[float | None, same("a number >= 0 and < 1, or null", ge=0, lt=1)] = None
    """Share of its records that is held out; null: `data.holdout`."""


class DataConfig(_Section):
    """Which documents, in which order, as which tokens."""

    sources: Annotated[
        tuple[SourceConfig, ...],
        same("a list of {name, path, format, text_field, weight, max_epochs}", min_length=1),
    ]
    """The sources: name, path or glob, format, content, the fields that hold it, weight, max_epochs,
    transforms, transform_fields, holdout.
    """
    transforms: Annotated[tuple[FunctionName, ...], same("a list of package.module:function")] = ()
    """Functions that a document passes between its record and its tokens, in this order: each makes of it a
    document, several, or none.
    """
    holdout: Annotated[float, same("a number >= 0 and < 1", ge=0, lt=1)] = 0.0
    """Share of the records that is never trained; `open_stream(part="holdout")` reads it."""
    tokenizer: Annotated[str, same("a folder, a bucket's URI or a hub name", min_length=1)]
    """Tokenizer: a folder, a bucket's URI or a hub name; its content is frozen with the run."""
    shuffle: Annotated[Literal["block", "none"], same("block or none")] = "block"
    """`block`: a keyed permutation of blocks and of the records inside windows; `none`: the files' order."""
    seed: Annotated[int, same("a whole number >= 0", ge=0)] = 0
    """Seed of the documents' order."""
    num_epochs: Annotated[int | None, may_change("a whole number >= 1, or null", ge=1)] = 1
    """Passes over the data; null: until a stop in `train`."""
    on_end: Annotated[Literal["stop", "drop", "repeat"] | None, may_change("stop, drop, repeat or null")] = (
        None
    )
    """Several sources, when one has come to its end: `stop` before the first sample that it cannot fill,
    `drop` it and go on with the others, `repeat` it (unless it has `max_epochs`); null: `stop` with weights,
    `drop` without.
    """
    weight_by: Annotated[Literal["tokens", "samples"], may_change("tokens or samples")] = "tokens"
    """What the weights are shares of."""
    refresh: Annotated[Literal["epoch"] | None, may_change("epoch or null")] = None
    """`epoch`: the sources' files are listed anew for each epoch, when its turn comes; null: new files stay
    out.
    """
    num_tokenizers: Annotated[int, free("a whole number >= 1", ge=1)] = 2
    """Processes that read and tokenize; each takes a logical CPU if the workers leave so many, else none."""
    bos: Annotated[
        Literal["auto"] | bool | TokenText, same("auto, true or false, or a token such as <|endoftext|>")
    ] = "auto"
    """A BOS token before every document; `auto`: where the tokenizer itself adds one; or the token's text."""
    eos: Annotated[bool | TokenText, same("true or false, or a token such as <|endoftext|>")] = True
    """An EOS token after every document (of a chat only what its template writes); or the token's text, where
    the tokenizer does not declare which it is.
    """
    special_tokens_in_text: Annotated[Literal["text", "parse", "stop"], same("text, parse or stop")] = "text"
    """Special tokens written out in a document: plain text, parsed as special, or a stop."""
    on_bad_document: Annotated[Literal["stop", "skip"], same("stop or skip")] = "stop"
    """A document that cannot be read: stop, or count and skip it."""
    max_bad_share: Annotated[float, may_change("a number from 0 to 1", ge=0, le=1)] = 0.01
    """Share of bad documents above which the run stops under `on_bad_document: skip`."""
    window_bytes: Annotated[int, same("a whole number >= 1, in bytes", ge=1)] = 16 << 20
    """Documents are permuted within windows of at most this many decoded bytes."""
    fragment_bytes: Annotated[int, same("a whole number >= 1, in bytes", ge=1)] = 2 << 20
    """Size of the pieces that files are read in, in bytes."""
    memory_bytes: Annotated[int | None, free("a whole number >= 1, in bytes, or null", ge=1)] = None
    """Bound of the memory of feeder, tokenizers and the tokens between them, in bytes; null: what is usual
    for the other settings, which `plan` prints with its parts.
    """
    replay_bytes: Annotated[int, free("a whole number >= 1, in bytes", ge=1)] = 256 << 20
    """Bound of the feeder's memory for batches that may be asked for again, in bytes."""
    encoder: Annotated[
        Literal["auto", "gigatoken", "tokenizers"], may_change("auto, gigatoken or tokenizers")
    ] = "auto"
    """Library that encodes, another one from the next whole document on; `auto`: the run's own, at first
    gigatoken where it agrees with tokenizers.
    """


class PackConfig(_Section):
    """How tokens become samples."""

    mode: Annotated[Literal["concat", "bestfit", "pad"], same("concat, bestfit or pad")] = "concat"
    """`concat`: one stream cut at any place; every token but the first is a target once. `bestfit`: whole
    documents side by side, those of a window packed into as few samples as best-fit decreasing finds. `pad`:
    a document per sample.
    """
    seq_len: Annotated[int, may_change("a whole number >= 1", ge=1)]
    """Tokens per sample; under `bestfit` and `pad` it cannot change while packs of a window are taken."""
    long_document: Annotated[Literal["stop", "split", "skip"], same("stop, split or skip")] = "stop"
    """What happens to a document that no sample holds (`bestfit`, `pad`): the run stops, it is cut into
    stretches of `seq_len`, or it is skipped and counted.
    """
    max_long_share: Annotated[float, may_change("a number from 0 to 1", ge=0, le=1)] = 0.5
    """Share of a source's documents that no sample holds above which the run stops under
    `long_document: skip`.
    """
    document_attention: Annotated[bool | None, may_change("true, false, or null")] = None
    """Whether tokens attend to their own document alone, with positions that begin at each; null: under
    `bestfit`.
    """

    @property
    def attends_by_document(self) -> bool:
        """`document_attention` with its default made."""
        return self.mode == "bestfit" if self.document_attention is None else self.document_attention


class ModelConfig(_Section):
    """What is trained; exactly one of `config`, `pretrained`, `factory`."""

    config: Annotated[dict[str, Any] | None, same("a mapping with model_type, or null")] = None
    """A transformers configuration with `model_type`; the weights start at random."""
    pretrained: Annotated[str | None, same("a folder or URI, or null", min_length=1)] = None
    """Folder, or a bucket's URI, in transformers' format with safetensors to start from."""
    factory: Annotated[
        str | None,
        same("package.module:function, or null", pattern=FUNCTION),
    ] = None
    """`package.module:function` that returns the model; before a new run it is called once on torch's meta
    device.
    """
    factory_args: Annotated[dict[str, Any], same("a mapping of arguments")] = Field(default_factory=dict)
    """Keyword arguments of the factory."""
    init_from: Annotated[str | None, same("a folder or URI, or null", min_length=1)] = None
    """Folder, or a bucket's URI, that the first weights of a new run come from: exported ones, or a point of
    another run.
    """
    attn_implementation: Annotated[Literal["auto", "eager", "sdpa"], may_change("auto, eager or sdpa")] = (
        "auto"
    )
    """How a transformers model computes attention; `auto`: `sdpa` where its architecture has it, else what
    transformers takes for it; `eager` under invariant numerics on GPUs.
    """


class ShardsConfig(_Section):
    """`train.parallel` as HSDP."""

    shard: Annotated[int, Field(ge=2)]
    """Workers that hold the state together."""
    replicate: Annotated[int, Field(ge=1)]
    """How many times they hold it, with all workers there."""


class TrainConfig(_Section):
    """Batches, length, optimizer and schedule."""

    global_batch_size: Annotated[int, may_change("a whole number >= 1, in samples", ge=1)]
    """Samples per step, over all workers."""
    micro_batch_size: Annotated[int, may_change("a whole number >= 1, in samples", ge=1)]
    """Samples per forward pass; need not divide the batch, the last micro-batch is smaller."""
    max_steps: Annotated[int | None, may_change("a whole number >= 1, or null", ge=1)] = None
    """Stop after this many steps of the batch size and seq_len it was first given with; null: no limit."""
    max_samples: Annotated[int | None, may_change("a whole number >= 1, or null", ge=1)] = None
    """Stop after this many samples; null: no limit."""
    max_tokens: Annotated[int | None, may_change("a whole number >= 1, or null", ge=1)] = None
    """Stop after this many tokens (positions); null: no limit."""
    lr: Annotated[float, may_change("a number > 0, e.g. 3e-4", gt=0)]
    """Highest learning rate."""
    min_lr_ratio: Annotated[float, may_change("a number from 0 to 1", ge=0, le=1)] = 0.1
    """Where a decay ends, as a share of `lr`."""
    schedule: Annotated[Literal["constant", "cosine", "wsd"], may_change("constant, cosine or wsd")] = (
        "constant"
    )
    """Learning rate over consumed tokens; `wsd`: warm up, stay, decay linearly."""
    warmup_steps: Annotated[int, may_change("a whole number >= 0, in steps", ge=0)] = 0
    """Steps of linear warm-up, turned into tokens when first given."""
    decay_steps: Annotated[int | None, may_change("a whole number >= 1, or null", ge=1)] = None
    """Steps of the decay at the end (`wsd` only), turned into tokens when first given."""
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]],
        may_change("two numbers >= 0 and < 1, e.g. [0.9, 0.95]"),
    ] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: Annotated[float, may_change("a number > 0", gt=0)] = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[float, may_change("a number >= 0", ge=0)] = 0.1
    """AdamW's weight decay."""
    max_grad_norm: Annotated[float | None, may_change("a number > 0, or null", gt=0)] = 1.0
    """Gradients are clipped to this norm; null: never."""
    seed: Annotated[int, may_change("a whole number >= 0", ge=0)] = 0
    """Seed of the initial weights and of dropout."""
    precision: Annotated[
        Literal["float32", "bf16", "pure_bf16"], may_change("float32, bf16 or pure_bf16")
    ] = "float32"
    """`bf16`: products in bfloat16 (autocast); weights, gradients and moments stay float32. `pure_bf16`: all
    in bfloat16: steps below about 1/256 of a weight are lost (at usual rates most, and norms never move), and
    no resume changes to or from it.
    """
    numerics: Annotated[Literal["auto", "invariant", "fast"], may_change("auto, invariant or fast")] = "auto"
    """`invariant`: the same bits on any number of workers, under `parallel: replicate` only; `auto`:
    invariant on CPU where each worker holds the whole state, else fast.
    """
    parallel: Annotated[
        Literal["auto", "replicate", "shard"] | ShardsConfig,
        may_change("auto, replicate, shard or {shard: n, replicate: m}"),
    ] = "auto"
    """Who holds the state: `replicate`: each worker all of it (DDP). `shard`: each an equal part (FSDP2).
    `{shard: n, replicate: m}`: n workers together, m times (HSDP); with a number of workers that n does not
    divide each holds a part of its own. `auto`: replicate where that fits in memory, else shard.
    """
    compile: Annotated[Literal["none", "blocks"], may_change("none or blocks")] = "none"
    """`blocks`: each block of a sharded model is compiled by `torch.compile`, which takes up to minutes in
    the first step of each process; last bits change.
    """
    activation_checkpointing: Annotated[Literal["none", "blocks"], may_change("none or blocks")] = "none"
    """`blocks`: activations inside each block of a sharded model are not kept for backward, but computed
    again: less memory, about a third more work.
    """

    def is_fast(self, use_gpu: bool) -> bool:
        """Whether last bits depend on the number of workers, as far as the configuration says it."""
        if self.numerics == "auto":
            return use_gpu or self.num_shards != 1
        return self.numerics == "fast"

    @property
    def num_shards(self) -> int | None:
        """Into how many parts `parallel` cuts the state (None: one for each worker); 1 under `auto`, which is
        decided by who knows the machines.
        """
        if isinstance(self.parallel, ShardsConfig):
            return self.parallel.shard
        return None if self.parallel == "shard" else 1


class ClusterConfig(_Section):
    """How many workers, on what."""

    num_workers: Annotated[
        Annotated[int, Field(ge=1)] | tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]],
        free("a whole number >= 1, or [min, max]"),
    ] = 1
    """Workers; while some are missing the run goes on with the others. Or [min, max]: starts with min
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


class ResumeConfig(_Section):
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
    """Also keep so many points with the lowest mean loss of the steps since the point before."""
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
    accept_changed: Annotated[bool, may_change("true or false")] = False
    """Go on although files of the sources have changed."""


class MonitorConfig(_Section):
    """What is shown while it runs."""

    progress_s: Annotated[float, free("a number > 0, in seconds", gt=0)] = 5.0
    """Time between two lines of progress, in seconds."""
    digest_every_steps: Annotated[int | None, free("a whole number >= 1, or null", ge=1)] = None
    """Journal the digest of the weights every so many steps, for `replay`; null: only points have it."""
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


class JobConfig(_Section):
    """A whole job, valid and frozen. Made by `load_config` or `parse_config`; pickles."""

    run: RunConfig
    data: DataConfig
    pack: PackConfig
    model: ModelConfig
    train: TrainConfig
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    resume: ResumeConfig = Field(default_factory=ResumeConfig)
    monitor: MonitorConfig = Field(default_factory=MonitorConfig)

    def to_json(self) -> dict[str, Any]:
        """Sections and fields as plain JSON values; `parse_config` of it gives an equal configuration."""
        return self.model_dump(mode="json")

    def flat(self) -> dict[str, Any]:
        """Dotted path of every field (`train.lr`, `resume.from`) to its JSON value, in declared order."""
        return {f"{s}.{f}": value for s, fields in self.to_json().items() for f, value in fields.items()}


def in_todays_fields(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A flat configuration that any version has stored, under the names and values of this one; a field that
    did not exist then is left out (it had what is its default now), one of a source has that default.
    """
    now = dict(flat)
    weights = now.pop("model.dtype", None)
    if weights is not None:
        now["train.precision"] = {"float32": "float32", "bfloat16": "pure_bf16"}[weights]
    if "data.sources" in now:
        fields = SourceConfig.model_fields.items()
        defaults = {name: _json_default(info) for name, info in fields if not info.is_required()}
        now["data.sources"] = [{**defaults, **source} for source in now["data.sources"]]
    return now


def nested(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A flat configuration (`section.field`) as sections and fields."""
    sections: dict[str, dict[str, Any]] = {}
    for path, value in flat.items():
        section, _, field = path.partition(".")
        sections.setdefault(section, {})[field] = value
    return sections


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldRule:
    """What a field means and what a resume may do with it. `default` is a JSON value, None if `required`."""

    path: str
    rule: Rule
    doc: str
    default: Any
    required: bool
    expected: str


def field_rules() -> list[FieldRule]:
    """The declaration of every field, in the order and with the paths of `JobConfig.flat`."""
    return [
        _rule(f"{section}.{info.alias or name}", info)
        for section, kind in _sections()
        for name, info in kind.model_fields.items()
    ]


def _sections() -> Iterator[tuple[str, type[BaseModel]]]:
    for name, info in JobConfig.model_fields.items():
        assert isinstance(info.annotation, type), f"section {name} is a class"
        yield name, info.annotation


def _rule(path: str, info: FieldInfo) -> FieldRule:
    declared = info.json_schema_extra
    assert isinstance(declared, dict), f"{path} declares its resume rule"
    assert info.description, f"{path} has a docstring"
    required = info.is_required()
    default = None if required else _json_default(info)
    rule: Any = declared["resume"]
    return FieldRule(
        path=path,
        rule=rule,
        doc=info.description,
        default=default,
        required=required,
        expected=str(declared["expected"]),
    )


def _json_default(info: FieldInfo) -> Any:
    return json.loads(json.dumps(info.get_default(call_default_factory=True)))


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> JobConfig:
    """The configuration in the YAML file `path` with the overrides `section.field=value` set on top.

    Relative paths stay as written: they are relative to the current directory. Raises `ConfigError` with
    every problem, one per line.
    """
    return _finish(*_read(path), overrides)


def parse_config(mapping: Mapping[str, Any], overrides: Sequence[str] = ()) -> JobConfig:
    """The same for a mapping made in Python, or read back from a `config.json`."""
    return _finish(*_read(mapping), overrides)


def as_job(config: JobConfig | Mapping[str, Any] | str | Path, overrides: Sequence[str] = ()) -> JobConfig:
    """A job by whatever names it (itself, a mapping, a YAML file), with the overrides set on top."""
    if isinstance(config, str | Path):
        return load_config(config, overrides)
    if isinstance(config, Mapping):
        return parse_config(config, overrides)
    if not isinstance(config, JobConfig):
        raise ConfigError(
            f"a job is given as the path of a YAML file, a mapping or a JobConfig, not as {config!r}"
        )
    return parse_config(config.to_json(), overrides) if overrides else config


def as_data_job(
    config: JobConfig | Mapping[str, Any] | str | Path, overrides: Sequence[str] = ()
) -> JobConfig:
    """The same for whoever only reads its data: what that does not need may be left out, which is `run`,
    `model`, `train.lr`, and a stop where the data have no end.
    """
    if not isinstance(config, str | Path | Mapping):
        return as_job(config, overrides)
    reading, title = _read(config)
    for section, fields in _UNREAD_BY_DATA.items():
        given = reading.value.setdefault(section, {})
        if isinstance(given, dict) and (section != "model" or not given):
            given |= {name: value for name, value in fields.items() if name not in given}
    return _finish(reading, title, overrides)


# what stands in for a field that nobody reads
_UNREAD_BY_DATA: Mapping[str, Mapping[str, Any]] = {
    "run": {"name": "stream"},
    "model": {"factory": "no:model"},
    "train": {"lr": 1.0, "max_tokens": 1 << 62},
}


def _read(config: Mapping[str, Any] | str | Path) -> tuple[Reading, str]:
    """What stands in a mapping or a YAML file, and how messages name it."""
    if isinstance(config, Mapping):
        return read_mapping(config), "configuration"
    try:
        text = Path(config).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{config}: cannot be read as a UTF-8 text: {error}; give the path of a YAML file"
        ) from error
    return read_yaml(text), str(config)


def _finish(reading: Reading, title: str, overrides: Sequence[str]) -> JobConfig:
    """Validate what was read. The rules inside a field are pydantic's, those between fields are our own."""
    if isinstance(overrides, str) or not isinstance(overrides, Sequence):
        what = "the text " if isinstance(overrides, str) else ""
        raise ConfigError(
            f'overrides is {what}{overrides!r}; give a list of "key=value", e.g. ["train.lr=3e-4"]'
        )
    if reading.unread:
        raise ConfigError(_message(reading, title))
    apply_overrides(reading, overrides)
    config = None
    try:
        # by way of JSON: strict there means exact types, while a list still makes a tuple
        config = JobConfig.model_validate_json(json.dumps(reading.value, allow_nan=False))
    except ValidationError as error:
        named = {problem.path for problem in reading.problems}
        reading.problems += [p for p in describe(error, reading.value, JobConfig) if p.path not in named]
    rules = {rule.path: rule for rule in field_rules()}
    reading.problems += cross_field_problems(reading, {path: rule.default for path, rule in rules.items()})
    if reading.problems or config is None:
        raise ConfigError(_message(reading, title))
    return config


def _message(reading: Reading, title: str) -> str:
    lines = [_problem_line(problem, reading) for problem in reading.problems]
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return "\n".join([f"{title}: {count}", *(f"  {line}" for line in lines)])


def _problem_line(problem: Problem, reading: Reading) -> str:
    path = ".".join(map(str, problem.path))
    place = reading.place(problem.path)
    text = f"{path} {problem.text}" if path else problem.text
    return f"{text} ({place})" if place and place not in text else text


def resume_table() -> str:
    """Every field as a Markdown table: field, default, what a resume may do with it, meaning."""
    words = {"same": "same", "may_change": "may change", "free": "free"}
    lines = ["| field | default | on resume | meaning |", "|---|---|---|---|"]
    for rule in field_rules():
        default = "(required)" if rule.required else f"`{json.dumps(rule.default)}`"
        doc = rule.doc.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| `{rule.path}` | {default} | {words[rule.rule]} | {doc} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(resume_table() + "\n")
