"""Tests a job's model before anything is started: builds it on torch's meta device and runs one forward pass.

It reports problems that every start would have. Neither importing this module nor testing a model loads torch
into a process that has not loaded it.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from orchestrator.config.sections import BUILT_IN, ModelConfig, TrainConfig
from orchestrator.errors import ConfigError, OrchestratorError
from orchestrator.paused_gc import paused_gc
from orchestrator.planning.state.memory import ModelSize
from orchestrator.trainer.callback_process import require_callback
from orchestrator.trainer.dry_run.meta_models import (
    SMALL_BYTES,
    adapters_note,
    frozen_note,
    frozen_on_meta,
    frozen_small,
    largest_table,
    model_name,
    model_on_meta,
    num_embeddings,
    require_export,
    require_teacher,
    scalars_of,
    size_of,
)
from orchestrator.trainer.weights.weight_files import holds_model, holds_weights
from orchestrator.user_function import find_function

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig
    from orchestrator.planning.resume.resume_plan import ResumePlan
    from orchestrator.trainer.objective.plug_in import PlugIn

# Importing transformers takes seconds; building a model on the meta device takes less than one.
_LIMIT_S = 300.0
# The memory that a trial process may allocate in addition to what it has at its start
_MEMORY_BYTES = 4 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """The facts that were found about a model.

    `num_embeddings`: the number of ids it embeds, None if the model does not provide it
    (`get_input_embeddings`).
    `largest_table`: for such a model, the rows of the largest `torch.nn.Embedding`, None if it has none.
    `num_logits`: the number of ids its logits cover, None if no forward pass was run.
    `scalars`: the names of parameters without dimensions.
    `size`: None if the model was not built.
    `optimizer`: notes on which optimizer trains which parameters, and what it keeps.
    `frozen`: notes on what is not trained: frozen models, and the weights beside adapters.
    `note`: a text for the user about what could not be tried, empty if there is none.
    """

    num_embeddings: int | None = None
    largest_table: int | None = None
    num_logits: int | None = None
    scalars: Sequence[str] = ()
    size: ModelSize | None = None
    optimizer: Sequence[str] = ()
    frozen: Sequence[str] = ()
    note: str = ""


def require_model(
    job: JobConfig,
    plan: ResumePlan,
    vocab_size: int,
    facts: ModelFacts | None = None,
    trains_here: bool = True,
) -> tuple[str, ...]:
    """Raises `ConfigError` if no start can use the job's model with its tokenizer.

    That is so if no start can build the model, or if the tokenizer has ids that it does not embed. The
    tokenizer has `vocab_size` ids. Returns notes. `facts`: the result of an earlier trial, if there was one.

    A model that the run's point was made with is not tried again. Then the user's functions are imported, and
    the weights that workers read beside the point must be there (`lacks_weights`). Where the workers run on
    other machines than this one (not `trains_here`), these may have the weights, and a note warns.
    """
    if not is_to_try(plan):
        return () if is_done(plan) else _require_needs(job, trains_here)
    facts = try_model(job) if facts is None else facts
    require_vocabulary(facts, job, vocab_size)
    require_rows(facts, job)
    if facts.size is not None and facts.size.frozen == facts.size.parameters:
        raise ConfigError(
            f"the model of {_where(job)} has no trainable parameter: all {facts.size.parameters:,} are "
            "frozen (requires_grad=False); unfreeze some",
            code="model.nothing_trainable",
        )
    notes = [*facts.frozen, *facts.optimizer, *([facts.note] if facts.note else [])]
    if facts.largest_table is not None and facts.largest_table < vocab_size:
        notes.append(
            f"warning: the largest torch.nn.Embedding of model.factory={job.model.factory} has "
            f"{facts.largest_table} rows, and the tokenizer {job.data.tokenizer} has {vocab_size} ids: "
            "unless the model itself maps ids to rows, training fails at the first larger id"
        )
    return tuple(notes)


def _require_needs(job: JobConfig, trains_here: bool) -> tuple[str, ...]:
    if names_functions(job.model, job.train):
        _build_elsewhere({**_task(job), "only_imports": True})
    if lacks_weights(job.model):
        try:
            try_model(job)
        except ConfigError as error:
            if trains_here:
                raise
            return (f"warning: from here {error}",)
    return ()


def names_functions(model: ModelConfig, train: TrainConfig) -> bool:
    """Whether the configuration names functions of the user that training calls."""
    named = [train.objective, train.objective_units, train.optimizer, *train.callbacks]
    factories = [model.factory, *(frozen.factory for frozen in model.frozen.values())]
    return any(":" in name for name in named) or any(factories)


def import_functions(model: ModelConfig, train: TrainConfig) -> None:
    """Imports the functions of model, objective and optimizer. This loads torch.

    Raises `ConfigError` as a trial of the model does if one cannot be imported or does not take its
    arguments.
    """
    from orchestrator.trainer.model.build_model import find_factory
    from orchestrator.trainer.objective.objective import objective_of
    from orchestrator.trainer.optimizer.optimizers import kind_of
    from orchestrator.trainer.state.frozen_weights import naming_frozen

    if model.factory is not None:
        find_factory(model)
    for name, frozen in model.frozen.items():
        if frozen.factory is not None:
            with naming_frozen(name):
                find_factory(frozen.as_model)
    kind_of(train.optimizer, train)
    if train.objective != BUILT_IN:
        objective_of(train, by_document=False, seq_len=1)


def lacks_weights(model: ModelConfig) -> bool:
    """Whether files are missing that the workers of every start read, also if it continues a point.

    These are the weights of frozen models, the weights beside adapters, and `model.pretrained`, which says
    what the model is. Only names are looked at. Raises `StorageError`, and `ConfigError` for a URI of another
    kind.
    """
    adapted = model.lora is not None
    read = [model if adapted else model.model_copy(update={"init_from": None})]
    read += [frozen.as_model for frozen in model.frozen.values()]
    return any(map(_is_away, read))


def _is_away(model: ModelConfig) -> bool:
    if model.pretrained is not None and not holds_model(model.pretrained):
        return True
    return model.init_from is not None and not holds_weights(model.init_from)


def is_done(plan: ResumePlan) -> bool:
    """Whether a start has nothing left to train, and therefore starts no worker."""
    return plan.point is not None and plan.remaining_steps == 0


def is_to_try(plan: ResumePlan) -> bool:
    """Whether a start tries the model: the model or its code differs from what the run's point was
    made with.
    """
    return plan.point is None or plan.code_changed or any(
        d.field.startswith(
            (
                *("model.", "pack.document_attention", "pack.seq_len", "train.parallel"),
                *("train.objective", "train.optimizer", "train.param_groups", "train.weight_decay"),
                "train.callbacks",
            )
        )
        for d in plan.differences
    )


def try_model(job: JobConfig) -> ModelFacts:
    """Builds the job's model on the meta device and calls it once with a sample of `pack.seq_len`.

    Raises `ConfigError` if that is impossible, if `model.config` has keys that no model would read, and if no
    training can use the model (`factory_output.CODE`).

    A model that does not work on the meta device is built on this machine's CPU if it is small. Otherwise it
    is left to the workers, and `note` reports that. Pretrained weights are not read, but their existence is
    checked.
    """
    task = _task(job)
    if not names_functions(job.model, job.train) and "torch" in sys.modules:
        return _build(job.model, **{name: value for name, value in task.items() if name not in _OUTSIDE})
    # A user's module is imported again each time, because a notebook user may have fixed it.
    return _build_elsewhere(task)


_OUTSIDE = ("model", "units", "callbacks")  # of a task, what is no argument of `_build`


def _task(job: JobConfig) -> dict[str, Any]:
    """Returns what the process that tries the model is given."""
    use_gpu, train = job.cluster.use_gpu, job.train
    units = train.objective_units if ":" in train.objective_units else None
    return {
        "model": job.model.model_dump(mode="json"),
        "units": units,
        "callbacks": list(train.callbacks),
        "device_type": "cuda" if use_gpu else "cpu",
        "invariant": not train.is_fast(use_gpu),
        # samples of this length have attention within documents; None: attention to the whole sample
        "within": job.pack.seq_len if job.pack.attends_by_document else None,
        "seq_len": job.pack.seq_len,
        "rows_per_sample": job.data.rows_per_sample,
        "precision": train.precision,
        "objective": None if train.objective == BUILT_IN else (train.objective, train.objective_args),
        "train": train.model_dump_json(),
    }


def require_vocabulary(facts: ModelFacts, job: JobConfig, vocab_size: int) -> None:
    """Raises `ConfigError` if the tokenizer has more ids than the model embeds, or than the logits cover that
    the built-in objective takes.

    `vocab_size` is the number of the tokenizer's ids.
    """
    if facts.num_embeddings is not None and facts.num_embeddings < vocab_size:
        raise ConfigError(
            f"the model of {_where(job)} embeds {facts.num_embeddings} ids, but the tokenizer "
            f"{job.data.tokenizer} has {vocab_size}; take the model's own tokenizer, or a model of at "
            f"least {vocab_size} ids",
            code="model.vocabulary",
        )
    of_ids = job.train.objective == BUILT_IN  # a plug-in may take numbers of another kind
    if of_ids and facts.num_logits is not None and facts.num_logits < vocab_size:
        raise ConfigError(
            f"the model of {_where(job)} gives logits of {facts.num_logits} ids, but the tokenizer "
            f"{job.data.tokenizer} has {vocab_size}; take the model's own tokenizer, or a model of at "
            f"least {vocab_size} ids",
            code="model.vocabulary",
        )


def _where(job: JobConfig) -> str:
    model = "model.config" if job.model.pretrained is None else f"model.pretrained={job.model.pretrained}"
    return model if job.model.factory is None else f"model.factory={job.model.factory}"


def require_rows(facts: ModelFacts, job: JobConfig) -> None:
    """Raises `ConfigError` if the state is to be sharded and a parameter has no rows to divide."""
    if facts.scalars and job.train.parallel not in ("auto", "replicate"):
        more = f" and {len(facts.scalars) - 1} more" if len(facts.scalars) > 1 else ""
        raise ConfigError(
            f"the model's parameter {facts.scalars[0]}{more} has the shape (), and a sharded state is "
            "divided by rows, of which it has none; give it the shape (1,), or set train.parallel=replicate",
            code="model.scalar_parameter",
        )


def _build_elsewhere(task: dict[str, Any]) -> ModelFacts:
    """Builds the model in another process.

    torch and transformers take 250 MB that a driver does not need.
    """
    # it imports what this process can import, and from the current directory, as Ray's workers do
    places = [*(path for path in sys.path if path), os.getcwd()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    command = [sys.executable, "-P", "-m", "orchestrator.trainer.dry_run.model_dry_run"]
    given = json.dumps(task)
    try:
        ended = subprocess.run(  # noqa: S603  this Python, and a module of ours
            command,
            input=given,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"the model was not built on the meta device within {_LIMIT_S:.0f} s; correct model.factory",
            code="model.trial_timeout",
        ) from error
    except subprocess.CalledProcessError as error:
        raise ConfigError(
            f"the process that tries the model ended with {error.returncode}:\n{error.stderr[-2000:]}",
            code="model.trial_died",
        ) from error
    answer = json.loads(ended.stdout.splitlines()[-1])
    if "refused" in answer:
        raise ConfigError(answer["refused"], code=answer["code"])
    size = answer["size"] and ModelSize(**answer["size"])
    lists = {name: tuple(answer[name]) for name in ("scalars", "optimizer", "frozen")}
    return ModelFacts(**answer | lists | {"size": size})


def _build(
    config: ModelConfig,
    device_type: str,
    invariant: bool,
    within: int | None = None,
    seq_len: int = 1,
    rows_per_sample: int = 1,
    precision: str = "float32",
    objective: tuple[str, Mapping[str, Any]] | None = None,
    train: str | None = None,
) -> ModelFacts:
    import torch

    from orchestrator.trainer.dry_run.attention_dry_run import small_copies
    from orchestrator.trainer.model import build_model as models
    from orchestrator.trainer.model.factory_output import Forward, try_forward
    from orchestrator.trainer.objective.plug_in import PlugIn
    from orchestrator.trainer.weights.lora import add_adapters
    from orchestrator.trainer.weights.transformers_model import transformers_settings, wants_flex

    with torch.random.fork_rng(devices=[]):
        model, note = model_on_meta(config, device_type, invariant, precision, within is not None)
        if model is None:
            return ModelFacts(note=note)
        if config.factory is None:
            require_export(config, model)
        known, largest = num_embeddings(model), largest_table(model)
        if config.lora is not None:
            add_adapters(model, config.lora, 0)
        frozen = frozen_on_meta(config, device_type, invariant, precision, within is not None)
        if train is not None:
            require_teacher(model, frozen, TrainConfig.model_validate_json(train))
        size = size_of(model, adapters=config.lora is not None)
        optimizer = () if train is None else _optimizer_notes(model, TrainConfig.model_validate_json(train))
        forward = Forward()
        if size.frozen < size.parameters:
            table = known or largest or size.vocab
            is_small = max(size.parameters, seq_len * table) * 4 <= SMALL_BYTES

            def on_cpu() -> Any:
                if not is_small:
                    return None
                return models.bare_model(config, precision, 0, torch.device("cpu"))

            forward = try_forward(model, model_name(config), seq_len, within is not None, on_cpu)
            copies: Iterable[Any] = ()
            if config.factory is None:
                copies = small_copies(*transformers_settings(config, device_type, invariant), seq_len)
            flex = device_type == "cuda" and not invariant and wants_flex(config)
            tried = chain(copies, _built(on_cpu))
            if not _require_attention(tried, model, config, within, seq_len, flex):
                note = f"{model_name(config)}: whether its logits depend on later tokens was not tried"
                forward = replace(forward, note="; ".join(filter(None, (forward.note, note))))
            if objective is not None and None not in frozen.values():
                by_document = within is not None
                plug_in = PlugIn(*objective, 0, precision, by_document, seq_len, frozen, rows_per_sample)

                def frozen_on_cpu() -> Any:
                    return frozen_small(config, frozen, precision)

                note = _try_objective(plug_in, model, on_cpu, frozen_on_cpu)
                forward = replace(forward, note="; ".join(filter(None, (forward.note, note))))
    return ModelFacts(
        num_embeddings=known,
        largest_table=None if known or config.factory is None else largest,
        num_logits=forward.vocab,
        scalars=scalars_of(model),
        size=size,
        optimizer=optimizer,
        frozen=(
            *(adapters_note(config, size) if config.lora is not None else ()),
            *(frozen_note(name, each) for name, each in frozen.items()),
        ),
        note=forward.note,
    )


def _optimizer_notes(model: Any, train: TrainConfig) -> tuple[str, ...]:
    """Says which optimizer trains which parameters, or that a plug-in could not be tried here."""
    from orchestrator.trainer.optimizer.optimizers import group_notes
    from orchestrator.trainer.optimizer.plug_in import NOT_TRIED

    try:
        return group_notes(model, train)
    except ConfigError as error:
        if error.code != NOT_TRIED:
            raise
        return (f"{error}. This machine may lack what it needs; the workers try it",)


def _try_objective(
    objective: PlugIn,
    model: Any,
    on_cpu: Callable[[], Any],
    frozen_on_cpu: Callable[[], dict[str, Any] | None],
) -> str:
    """Evaluates a plug-in objective once. Returns a note if that was not possible here."""
    try:
        objective.prepare(model)
    except ConfigError as error:
        if error.code != "objective.fails":
            raise
        real, frozen = on_cpu(), frozen_on_cpu()
        if real is None or frozen is None:
            return f"{error}. The model is too large to be built here; the workers try the objective"
        objective.frozen = frozen
        objective.prepare(real.train())
    return ""


def _built(on_cpu: Callable[[], Any]) -> Iterator[Any]:
    """Yields the job's own model, if it is small enough to be built here."""
    from orchestrator.trainer.dry_run.attention_dry_run import draw_weights

    with suppress(Exception):  # `try_forward` has reported its errors
        if (model := on_cpu()) is not None:
            draw_weights(model.float())
            yield model


def _require_attention(
    models: Iterable[Any], model: Any, config: ModelConfig, within: int | None, seq_len: int, flex: bool
) -> bool:
    """Checks attention with `attention_dry_run.require_attention`, and without a model from its declarations.

    Also raises `ConfigError` if documents need a trial and none is possible.
    """
    from orchestrator.trainer.dry_run.attention_dry_run import require_attention
    from orchestrator.trainer.model.model_call import has_windows, not_by_document, takes_document_ids

    if require_attention(models, model_name(config), seq_len, within is not None, flex):
        return True
    if within is not None and not takes_document_ids(model) and has_windows(model, within):
        raise not_by_document(
            f"{model_name(config)} has windows or chunks, and no small copy of it can be tried"
        )
    return False


def _main() -> None:
    """Runs the trial process: reads a task from stdin, and prints the facts or the refusal as the
    last line.
    """
    given = json.load(sys.stdin)
    try:
        config = ModelConfig.model_validate_json(json.dumps(given.pop("model")))
        if (units := given.pop("units")) is not None:
            find_function("train.objective_units", units, "objective.not_callable", num_positional=1)
        for name in given.pop("callbacks"):
            require_callback(name)
        only_imports = given.pop("only_imports", False)
        with paused_gc():
            import torch  # its own memory does not count

            torch.set_num_threads(1)  # each thread would take memory for its stack
            _limit_memory()
            if only_imports:
                import_functions(config, TrainConfig.model_validate_json(given["train"]))
            answer = asdict(ModelFacts() if only_imports else _build(config, **given))
    except OrchestratorError as error:
        answer = {"refused": str(error), "code": error.code}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


def _limit_memory() -> None:
    """Limits the memory of this process: larger allocations fail with a Python error.

    Has no effect if the system does not report the current usage.
    """
    with suppress(OSError, ValueError, StopIteration):
        with open("/proc/self/status") as status:
            used = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (used + _MEMORY_BYTES, hard))


if __name__ == "__main__":
    _main()
