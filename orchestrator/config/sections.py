"""The sections `data`, `pack`, `model` and `train`, and how a field of any section is declared.

A declaration states what a resume may do with the field, and what messages say of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from orchestrator.records.steps import rows_per_sample

Rule = Literal["same", "may_change", "free"]
# A function of a module.
FUNCTION = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
FunctionName = Annotated[str, Field(pattern=FUNCTION)]
NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}$"


def _declare(rule: Rule, expected: str, constraints: dict[str, Any]) -> Any:
    return Field(json_schema_extra={"resume": rule, "expected": expected}, **constraints)


def same(expected: str, **constraints: Any) -> Any:
    """A field that no resume may change. `expected` ends the sentence "expected …" in error texts."""
    return _declare("same", expected, constraints)


def may_change(expected: str, **constraints: Any) -> Any:
    """A field that a resume may change. Training continues with the new value and reports it."""
    return _declare("may_change", expected, constraints)


def free(expected: str, **constraints: Any) -> Any:
    """A field that has no influence on what is trained."""
    return _declare("free", expected, constraints)


def one_of(names: Sequence[str]) -> str:
    """Formats names for `expected`: `a, b or c`."""
    return f"{', '.join(names[:-1])} or {names[-1]}"


class Section(BaseModel):
    """A section of the configuration, frozen. The docstring of each field is its documentation."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        serialize_by_alias=True,
        defer_build=True,  # commands that only read a run parse no configuration
    )


FORMAT_NAMES: tuple[str, ...] = (
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
)
# Formats of this package, of an installed one (an entry point of `orchestrator.formats`), or a class.
FormatName = Annotated[str, Field(pattern=f"{NAME}|{FUNCTION}")]
# The text of a token, never a word that may be meant for true or false.
TokenText = Annotated[str, Field(pattern="[^A-Za-z]")]


def known_format(name: str) -> str:
    """Returns the name. Raises `ValueError` if it is no format; a user's class is not imported."""
    if name in FORMAT_NAMES or ":" in name:
        return name  # without reading the metadata of every installed package, which takes 0.1 s
    if name not in {entry.name for entry in entry_points(group="orchestrator.formats")}:
        raise ValueError(f"there is no format {name}")
    return name


class SourceConfig(Section):
    """One entry of `data.sources`."""

    name: Annotated[str, same("letters, digits, `.`, `_`, `-`, not starting with `.`", pattern=NAME)]
    """Name of the source; part of the order's key."""
    path: Annotated[str | tuple[str, ...], same("a path or glob, or a list of them", min_length=1)]
    """File, folder or glob, or a list of them, relative to the current directory; of format `python` the
    `package.module:function` that returns the records.
    """
    format: Annotated[
        FormatName,
        AfterValidator(known_format),
        same(
            f"{', '.join(FORMAT_NAMES)}, package.module:Format, or the name of an installed package's format "
            "(an entry point of orchestrator.formats)"
        ),
    ]
    """What the files are: a document is a record, in `lines` a line, in `text` a file; `python`: no files."""
    content: Annotated[
        Literal["text", "chat", "prompt", "preference"], same("text, chat, prompt or preference")
    ] = "text"
    """What a record holds: a text, the messages of a chat, a prompt with its completion, or a prompt with a
    chosen and a rejected answer (docs/howto/preference-tuning.md).
    """
    text_field: Annotated[str, same("the name of a field", min_length=1)] = "text"
    """Field that holds the text; dots lead into a record's inner fields (`meta.body`)."""
    messages_field: Annotated[str, same("the name of a field", min_length=1)] = "messages"
    """Field that holds the list of messages (`content: chat`)."""
    prompt_field: Annotated[str | None, same("the name of a field, or null", min_length=1)] = "prompt"
    """Field that holds what is given (`content: prompt` and `preference`); null: chosen and rejected are
    whole chats (`preference`), and the messages with which both begin are given.
    """
    completion_field: Annotated[str, same("the name of a field", min_length=1)] = "completion"
    """Field that holds what is to follow (`content: prompt`)."""
    chosen_field: Annotated[str, same("the name of a field", min_length=1)] = "chosen"
    """Field that holds the better answer (`content: preference`)."""
    rejected_field: Annotated[str, same("the name of a field", min_length=1)] = "rejected"
    """Field that holds the worse answer (`content: preference`)."""
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


class DataConfig(Section):
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

    @property
    def rows_per_sample(self) -> int:
        """How many rows of a micro-batch each sample has."""
        return rows_per_sample(source.content for source in self.sources)


class PackConfig(Section):
    """How tokens become samples."""

    mode: Annotated[Literal["concat", "bestfit", "pad"], same("concat, bestfit or pad")] = "concat"
    """`concat`: one stream cut at any place; every token but the first is a target once. `bestfit`: whole
    documents side by side, those of a window packed into as few samples as best-fit decreasing finds. `pad`:
    a document per sample.
    """
    seq_len: Annotated[int, may_change("a whole number >= 1", ge=1)]
    """Tokens per sample (of a preference, per answer with its prompt); under `bestfit` and `pad` it cannot
    change while packs of a window are taken.
    """
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


class FrozenModelConfig(Section):
    """One model of `model.frozen`; exactly one of `config`, `pretrained`, `factory`."""

    config: dict[str, Any] | None = None
    """A transformers configuration; the weights are those of `init_from`."""
    pretrained: Annotated[str, Field(min_length=1)] | None = None
    """As `model.pretrained`."""
    factory: FunctionName | None = None
    """As `model.factory`."""
    factory_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the factory."""
    init_from: Annotated[str, Field(min_length=1)] | None = None
    """As `model.init_from`: exported weights, or a point of another run."""
    attn_implementation: Literal["auto", "eager", "sdpa"] = "auto"
    """As `model.attn_implementation`."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """The type of its weights; null: that of the trained model's."""

    @property
    def as_model(self) -> ModelConfig:
        """The same model as a section `model`."""
        return ModelConfig(**self.model_dump(exclude={"dtype"}))


class LoraConfig(Section):
    """`model.lora`, carried out by peft (the extra `lora`)."""

    rank: Annotated[int, Field(ge=1)]
    """Rank of the adapters."""
    alpha: Annotated[float, Field(gt=0)]
    """What adapters give is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that are set to zero in training."""
    target_modules: (
        Annotated[str, Field(min_length=1)]
        | Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
        | None
    ) = None
    """The modules that get an adapter: the ends of their names, a regular expression of whole names, or
    `all-linear`: every linear layer but the head; null: peft's default for the architecture.
    """
    modules_to_save: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """The ends of names of modules that are trained as a whole beside the adapters."""
    use_rslora: bool = False
    """Scaled by alpha / sqrt(rank)."""


class ModelConfig(Section):
    """What is trained; exactly one of `config`, `pretrained`, `factory`."""

    config: Annotated[dict[str, Any] | None, same("a mapping with model_type, or null")] = None
    """A transformers configuration with `model_type`; the weights start at random, in the type that
    `train.precision` gives them (a `dtype` here must be that one).
    """
    pretrained: Annotated[str | None, same("a folder or URI, or null", min_length=1)] = None
    """Folder, or a bucket's URI, in transformers' format with safetensors to start from."""
    factory: Annotated[
        str | None,
        same("package.module:function, or null", pattern=FUNCTION),
    ] = None
    """`package.module:function` that returns the model; `plan` and a new run's start build it on torch's meta
    device and call it once (docs/howto/factories.md).
    """
    factory_args: Annotated[dict[str, Any], same("a mapping of arguments")] = Field(default_factory=dict)
    """Keyword arguments of the factory."""
    init_from: Annotated[str | None, same("a folder or URI, or null", min_length=1)] = None
    """Folder, or a bucket's URI, that the first weights of a new run come from: exported ones, or a point of
    another run.
    """
    lora: Annotated[
        LoraConfig | None,
        same(
            "null, or {rank: n >= 1, alpha: x > 0, dropout: 0 <= x < 1, target_modules: names, a regular "
            "expression, all-linear or null, modules_to_save: names, use_rslora: true or false}"
        ),
    ] = None
    """Low-rank adapters are trained (LoRA, by peft), and the weights of `model.pretrained`, or of
    `model.init_from`, stay as they are: points hold the adapters alone, and every start reads the weights
    (docs/howto/lora.md); null: all weights are trained.
    """

    @property
    def base(self) -> str | None:
        """Where the weights that the model begins with are read from; None: they are drawn."""
        return self.init_from or self.pretrained

    attn_implementation: Annotated[
        Literal["auto", "eager", "sdpa", "flex_attention"],
        may_change("auto, eager, sdpa or flex_attention"),
    ] = "auto"
    """How a transformers model computes attention; `auto`: as its configuration says, else `sdpa` where its
    architecture has it, else what transformers takes for it; `eager` under invariant numerics on GPUs;
    `flex_attention` on GPUs under fast numerics if documents are kept apart (docs/howto/speed.md).
    """
    frozen: Annotated[
        dict[Annotated[str, Field(pattern=r"^[A-Za-z]\w{0,99}$")], FrozenModelConfig],
        may_change("a mapping of names to {pretrained: ...} or other ways to give a model"),
    ] = Field(default_factory=dict)
    """Models beside it that are not trained, for objectives: teachers and references. They are held as the
    model is and are not part of resume points; a resume with other weights under the same name is refused
    (docs/howto/distillation.md).
    """


BUILT_IN = "causal_lm"  # the objective that needs no plug-in
OptimizerName = Literal["adamw", "muon", "lion", "adafactor", "sgd"]


class ShardsConfig(Section):
    """`train.parallel` as HSDP."""

    shard: Annotated[int, Field(ge=2)]
    """Workers that hold the state together."""
    replicate: Annotated[int, Field(ge=1)]
    """How many times they hold it, with all workers there."""


def _regex(pattern: str) -> str:
    """Returns the pattern. Raises `ValueError` if it is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern} is no regular expression: {error}") from error
    return pattern


class ParamGroupConfig(Section):
    """One entry of `train.param_groups`: trained parameters whose name has a match of `match`."""

    match: Annotated[str, AfterValidator(_regex), may_change("a regular expression", min_length=1)]
    """A regular expression; a parameter belongs to the entry if it is found anywhere in its name."""
    lr_scale: Annotated[float, may_change("a number > 0", gt=0)] = 1.0
    """Factor of the learning rate."""
    weight_decay: Annotated[float | None, may_change("a number >= 0, or null", ge=0)] = None
    """Weight decay; null: as without the entry."""
    optimizer: Annotated[
        OptimizerName | FunctionName | None,
        may_change("adamw, muon, lion, adafactor, sgd, package.module:name or null"),
    ] = None
    """Another optimizer, with its default arguments; null: as without the entry."""


OnTrouble = Literal["stop", "skip_step", "rewind_and_skip"]


class NonfinitePolicy(Section):
    """`train.on_nonfinite` with a budget."""

    action: OnTrouble
    """What happens to a step whose loss or gradient is not finite."""
    budget: Annotated[int, Field(ge=1)] = 10
    """The steps of the run's history that may be left out; the next one stops the run."""


class SpikePolicy(Section):
    """`train.on_spike`."""

    window: Annotated[int, Field(ge=4)]
    """The newest steps that a step is compared with."""
    threshold: Annotated[float, Field(gt=0)]
    """Standard deviations above their mean from which loss or gradient norm is a spike."""
    action: OnTrouble
    """What happens to such a step."""
    budget: Annotated[int, Field(ge=1)] = 10
    """The steps of the run's history that may be left out; the next one stops the run."""


class TrainConfig(Section):
    """Objective, batches, length, optimizer and schedule."""

    objective: Annotated[
        Literal["causal_lm"] | Annotated[str, Field(pattern=FUNCTION)],
        may_change("causal_lm or package.module:function"),
    ] = "causal_lm"
    """What is trained for: `causal_lm`: the next token's cross-entropy, and a router's loss where the model
    returns it; `package.module:function`: a plug-in (docs/howto/objectives.md).
    """
    objective_args: Annotated[dict[str, Any], may_change("a mapping of arguments")] = Field(
        default_factory=dict
    )
    """Keyword arguments of the objective."""
    objective_units: Annotated[
        Literal["targets", "samples"] | Annotated[str, Field(pattern=FUNCTION)],
        may_change("targets, samples or package.module:function"),
    ] = "targets"
    """What the loss of a step is divided by, counted over all workers; a function counts it for each sample,
    in the feeder and with NumPy alone (docs/howto/objectives.md).
    """

    global_batch_size: Annotated[int, may_change("a whole number >= 1, in samples", ge=1)]
    """Samples per step, over all workers; a preference is one sample of two rows."""
    micro_batch_size: Annotated[int, may_change("a whole number >= 1, in samples", ge=1)]
    """Samples per forward pass; need not divide the batch, the last micro-batch is smaller. A router's
    balancing loss is computed over these.
    """
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
    schedule: Annotated[
        Literal["constant", "linear", "cosine", "wsd", "power"]
        | Annotated[
            tuple[tuple[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=0)]], ...], Field(min_length=1)
        ],
        may_change("constant, linear, cosine, wsd, power, or a list of [tokens, factor of lr]"),
    ] = "constant"
    """Learning rate over consumed tokens: after the warm-up it stays, or falls until the run's end; `wsd`:
    stays, then falls linearly over `decay_steps`; `power`: falls as (1 − t)^`decay_power`; a list of
    [tokens, factor of lr]: straight lines between these points (docs/howto/schedules.md).
    """
    warmup_steps: Annotated[int, may_change("a whole number >= 0, in steps", ge=0)] = 0
    """Steps of linear warm-up, turned into tokens when first given."""
    decay_steps: Annotated[int | None, may_change("a whole number >= 1, or null", ge=1)] = None
    """Steps of the decay at the end (`wsd` only), turned into tokens when first given."""
    optimizer: Annotated[
        OptimizerName | FunctionName,
        may_change("adamw, muon, lion, adafactor, sgd or package.module:name"),
    ] = "adamw"
    """How weights change; `muon`: Muon for matrices of the model's blocks, AdamW for the rest;
    `package.module:name`: a plug-in (docs/howto/optimizers.md). A resume with another one needs
    `resume.optimizer: reset`.
    """
    optimizer_args: Annotated[dict[str, Any], may_change("a mapping of arguments")] = Field(
        default_factory=dict
    )
    """Keyword arguments of the optimizer (AdamW's are `betas`, `eps` and `weight_decay` here)."""
    param_groups: Annotated[
        tuple[ParamGroupConfig, ...], may_change("a list of {match, lr_scale, weight_decay, optimizer}")
    ] = ()
    """Parameters with a learning rate, weight decay or optimizer of their own, by a regular expression of
    their names; each entry must match some, and no parameter may match two.
    """
    decay_power: Annotated[float | None, may_change("a number > 0, or null", gt=0)] = None
    """Exponent of the decay (`power` only)."""
    lr_on_batch_change: Annotated[Literal["keep", "linear", "sqrt"], may_change("keep, linear or sqrt")] = (
        "keep"
    )
    """What a resume with another number of tokens per step (batch size times seq_len) does to the learning
    rate: keep it, or scale it by the ratio of new to old, or by the root of that; a changed `lr` counts as
    it is written.
    """
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]],
        may_change("two numbers >= 0 and < 1, e.g. [0.9, 0.95]"),
    ] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: Annotated[float, may_change("a number > 0", gt=0)] = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[float, may_change("a number >= 0", ge=0)] = 0.1
    """Weight decay of tensors of two and more dimensions, for any optimizer that has one."""
    ema: Annotated[float | None, may_change("a number > 0 and < 1, or null", gt=0, lt=1)] = None
    """Decay per step of averaged weights, which resume points hold beside the weights (`export --ema`); null:
    none. Set later, they begin with the weights of the point.
    """
    max_grad_norm: Annotated[float | None, may_change("a number > 0, or null", gt=0)] = 1.0
    """Gradients are clipped to this norm; null: never."""
    on_nonfinite: Annotated[
        OnTrouble | NonfinitePolicy,
        may_change("stop, skip_step, rewind_and_skip, or {action: one of these, budget: n >= 1}"),
    ] = "stop"
    """A step whose loss or gradient is not finite: `stop` the run; `skip_step`: pass its samples, and leave
    weights and optimizer as they are, for at most `budget` (10) steps of the run's history;
    `rewind_and_skip`: go back to the newest resume point and pass the samples from there up to this step, at
    most `budget` times in a launch (docs/howto/loss-spike.md).
    """
    on_spike: Annotated[
        SpikePolicy | None,
        may_change(
            "null, or {window: n >= 4, threshold: x > 0, action: stop, skip_step or rewind_and_skip, "
            "budget: n >= 1}"
        ),
    ] = None
    """The same for a step whose loss or gradient norm lies more than `threshold` standard deviations above
    the mean of the newest `window` steps; null: no step is a spike.
    """
    callbacks: Annotated[tuple[FunctionName, ...], free("a list of package.module:Class")] = ()
    """Classes that are called with each step, point and change of the group, in a process beside rank 0; they
    can change nothing that is trained (docs/howto/callbacks.md).
    """
    on_callback_error: Annotated[Literal["report", "stop"], free("report or stop")] = "report"
    """What an error of a callback does: it is reported, or it also saves and stops the run."""
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
    compile: Annotated[Literal["auto", "none", "blocks"], may_change("auto, none or blocks")] = "auto"
    """`blocks`: each block of the model is compiled by `torch.compile`, which takes up to minutes in the
    first step of each process; last bits change. `auto`: on GPUs under fast numerics, if the model has
    blocks that can be compiled.
    """
    kernels: Annotated[Literal["auto", "torch", "liger"], may_change("auto, torch or liger")] = "auto"
    """`liger`: norms, rotary positions and gated layers of a transformers model are computed by liger-kernel
    (the extra `gpu`), on GPUs under fast numerics and without compiled blocks; last bits change. `auto`:
    `torch`, whose compiled blocks are as fast (docs/howto/speed.md).
    """
    activation_checkpointing: Annotated[Literal["none", "blocks"], may_change("none or blocks")] = "none"
    """`blocks`: activations inside each block of the model are not kept for backward, but computed again:
    less memory, about a third more work.
    """

    def is_fast(self, use_gpu: bool) -> bool:
        """Whether last bits depend on the number of workers, as far as the configuration says it."""
        if self.numerics == "auto":
            return use_gpu or self.num_shards != 1
        return self.numerics == "fast"

    @property
    def nonfinite(self) -> NonfinitePolicy:
        """`on_nonfinite` with its defaults made."""
        given = self.on_nonfinite
        return given if isinstance(given, NonfinitePolicy) else NonfinitePolicy(action=given)

    @property
    def num_shards(self) -> int | None:
        """Into how many parts `parallel` cuts the state (None: one for each worker); 1 under `auto`, which is
        decided by who knows the machines.
        """
        if isinstance(self.parallel, ShardsConfig):
            return self.parallel.shard
        return None if self.parallel == "shard" else 1
