"""The rules between fields of a configuration, for fields that are each valid by themselves.

The rules check plain JSON values, so that one invalid field does not hide problems of the others.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.config.optimizer_fields import (
    adamw_only_problem,
    group_optimizer_problem,
    optimizer_args_problem,
)
from orchestrator.config.preference_fields import (
    eval_parts_problem,
    objective_problem,
    packing_problem,
    sources_problem,
)
from orchestrator.config.problems import MISSING, show, written
from orchestrator.config.sections import BUILT_IN, FUNCTION
from orchestrator.config.text import Path, Problem, Reading, value_at

_CODE = re.compile(FUNCTION)
_CONFLICT, _DUPLICATE, _NO_STOP = "config.conflict", "config.duplicate_entry", "config.no_stop"
NOTHING_HELD_OUT = "config.nothing_held_out"


@dataclass(frozen=True, slots=True)
class _Wrong:
    """The `code` and `text` of a `Problem` with a field."""

    code: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Between:
    """A rule: `check` is called with the values of `fields`, and returns a problem with the first."""

    fields: tuple[str, ...]
    check: Callable[..., _Wrong | None]


def cross_field_problems(reading: Reading, defaults: Mapping[str, Any]) -> list[Problem]:
    """Returns the problems between fields that are each valid. `defaults` has every dotted path."""
    wrong = {problem.path for problem in reading.problems}
    found = []
    for rule in _RULES:
        paths: list[Path] = [tuple(name.split(".")) for name in rule.fields]
        if any(bad[: len(path)] == path[: len(bad)] for path in paths for bad in wrong):
            continue  # already reported, or the whole section is invalid
        values = [
            defaults[name] if not written(reading.value, path) else value_at(reading.value, path)
            for name, path in zip(rule.fields, paths, strict=True)
        ]
        problem = rule.check(*values)
        if problem is not None:
            found.append(Problem(path=paths[0], code=problem.code, text=problem.text))
    return found


def _each_source_once(sources: list[Any]) -> _Wrong | None:
    names = [source.get("name") for source in sources]
    twice = sorted({str(name) for name in names if names.count(name) > 1})
    if not twice:
        return None
    return _Wrong(_DUPLICATE, f"has {', '.join(twice)} twice; give each source a name of its own")


def _weights(sources: list[Any]) -> _Wrong | None:
    without = [str(source.get("name")) for source in sources if source.get("weight") is None]
    if len(sources) == 1 or len(without) in (0, len(sources)):
        return None
    return _Wrong(
        _CONFLICT,
        f"gives a weight to some sources and none to {', '.join(without)}; give every source one, or none of "
        "them (then shares are by bytes)",
    )


def _lora_base(lora: Any, pretrained: Any, init_from: Any) -> _Wrong | None:
    if lora is None or pretrained is not None or init_from is not None:
        return None
    return _Wrong(
        _CONFLICT,
        "trains adapters of weights that stay as they are, and these would be random: model.pretrained and "
        "model.init_from are null; set model.pretrained, or model.init_from beside model.config or "
        "model.factory",
    )


def _repeating(on_end: str | None, sources: list[Any], *stops: int | None) -> _Wrong | None:
    if on_end != "repeat" or len(sources) == 1 or any(stop is not None for stop in stops):
        return None
    return _Wrong(
        _NO_STOP,
        "is repeat, which has no end, and there is no stop; set train.max_steps, train.max_samples or "
        "train.max_tokens",
    )


def _endless(num_epochs: int | None, *stops: int | None) -> _Wrong | None:
    if num_epochs is not None or any(stop is not None for stop in stops):
        return None
    return _Wrong(
        _NO_STOP,
        "is null (endless) and there is no stop; set train.max_steps, train.max_samples or train.max_tokens",
    )


def _loss_of_texts(sources: list[Any]) -> _Wrong | None:
    for source in sources:
        if (
            isinstance(source, dict)
            and source.get("content", "text") == "text"
            and source.get("loss") in ("last", "all")
        ):
            return _Wrong(
                _CONFLICT,
                f"has loss={source['loss']} for content: text, of which all is learnt; leave it out, or "
                "set content to chat or prompt",
            )
    return None


# The names by which transforms get the parts of a document, by content.
_OF_A_DOCUMENT = {
    "text": ("text",),
    "chat": ("messages", "tools"),
    "prompt": ("prompt", "completion"),
    "preference": ("prompt", "chosen", "rejected", "tools"),
}


def _transform_fields(sources: list[Any], transforms: Any) -> _Wrong | None:
    """Checks that `transform_fields` have transforms that see them, and names that are free."""
    for source in sources:
        fields = source.get("transform_fields") if isinstance(source, dict) else None
        if not fields:
            continue
        who, own = f"has transform_fields={show(fields)} for {source.get('name')}", source.get("transforms")
        if not (transforms if own is None else own):
            return _Wrong(
                _CONFLICT,
                f"{who}, which has no transforms that could see them; leave it out, or set data.transforms",
            )
        if twice := sorted({field for field in fields if fields.count(field) > 1}):
            return _Wrong(_DUPLICATE, f"{who}, with {twice[0]} twice; name each once")
        content = source.get("content", "text")
        if taken := [name for name in _OF_A_DOCUMENT[content] if name in fields]:
            return _Wrong(
                _CONFLICT,
                f"{who}, but transforms of content: {content} see the document itself as `{taken[0]}`; leave "
                "it out, or rename that field in the files",
            )
    return None


def _code_paths(sources: list[Any]) -> _Wrong | None:
    """Checks that sources made by Python code name that code."""
    for source in sources:
        path = source.get("path") if isinstance(source, dict) and source.get("format") == "python" else None
        if path is not None and not (isinstance(path, str) and _CODE.match(path)):
            return _Wrong(
                "config.invalid_value",
                f"has format: python and path={show(path)}, which names no function; give one as "
                "package.module:function",
            )
    return None


def _window(window_bytes: int, fragment_bytes: int) -> _Wrong | None:
    if window_bytes >= fragment_bytes:
        return None
    return _Wrong(
        _CONFLICT,
        f"is {window_bytes}, less than data.fragment_bytes={fragment_bytes}; a window holds a fragment",
    )


def _one_model(config: Any, pretrained: Any, factory: Any) -> _Wrong | None:
    given = {"config": config, "pretrained": pretrained, "factory": factory}
    names = [f"model.{name}" for name, value in given.items() if value is not None]
    if len(names) == 1:
        return None
    if names:
        return _Wrong(
            _CONFLICT,
            f"is one way to give the model, {' and '.join(names)} are set; keep one, set the others to null",
        )
    return _Wrong(MISSING, "is missing; set exactly one of model.config, model.pretrained, model.factory")


def _frozen_models(frozen: dict[str, dict[str, Any]]) -> _Wrong | None:
    for name, model in frozen.items():
        ways = [way for way in ("config", "pretrained", "factory") if model.get(way) is not None]
        if len(ways) != 1:
            found = " and ".join(ways) or "none of them"
            return _Wrong(
                _CONFLICT if ways else MISSING,
                f"has a model {name} with {found}; give it exactly one of config, pretrained, factory",
            )
        if model.get("config") is not None and model.get("init_from") is None:
            return _Wrong(
                MISSING,
                f"has a model {name} with a config and no weights; set its init_from, or give it as "
                "pretrained",
            )
        problems = (
            _model_type(model.get("config")),
            _factory_args(model.get("factory_args") or {}, model.get("factory")),
        )
        for wrong in filter(None, problems):
            return _Wrong(wrong.code, f"{wrong.text} (model {name})")
    return None


def _model_type(config: dict[str, Any] | None) -> _Wrong | None:
    if config is None or (isinstance(config.get("model_type"), str) and config["model_type"]):
        return None
    found = show(config.get("model_type"))
    return _Wrong(MISSING, f"has model_type={found}; set it to a name that transformers knows, e.g. llama")


def _factory_args(factory_args: dict[str, Any], factory: str | None) -> _Wrong | None:
    if factory is not None or not factory_args:
        return None
    return _Wrong(
        _CONFLICT,
        f"is {show(factory_args)}, but model.factory is null; set the factory, or leave the arguments out",
    )


def _each_logger_once(loggers: list[str]) -> _Wrong | None:
    if len(set(loggers)) == len(loggers):
        return None
    return _Wrong(_DUPLICATE, f"is {show(loggers)}, with one of them twice; name each once")


def _attention(
    wanted: str, factory: str | None, numerics: str, use_gpu: bool, apart: bool | None, mode: str
) -> _Wrong | None:
    if wanted != "auto" and factory is not None:
        return _Wrong(
            _CONFLICT,
            f"is {wanted}, but model.factory makes the model; leave it at auto, and configure the factory",
        )
    if wanted == "sdpa" and numerics == "invariant" and use_gpu:
        return _Wrong(
            _CONFLICT,
            "is sdpa, which adds up gradients in any order on a GPU, and train.numerics=invariant; set it to "
            "auto or eager, or train.numerics=fast",
        )
    if wanted != "flex_attention":
        return None
    if numerics == "invariant" or not use_gpu:
        return _Wrong(
            _CONFLICT,
            "is flex_attention, which needs a GPU and fast numerics; "
            f"cluster.use_gpu={str(use_gpu).lower()} and train.numerics={numerics}; set it to auto",
        )
    if not (mode == "bestfit" if apart is None else apart):
        return _Wrong(
            _CONFLICT,
            "is flex_attention, which keeps documents apart, but they are not kept apart; set it to auto, or "
            "pack.document_attention=true",
        )
    return None


def _positions(seq_len: int, config: dict[str, Any] | None) -> _Wrong | None:
    most = (config or {}).get("max_position_embeddings")
    if type(most) is not int or seq_len <= most:
        return None
    return _Wrong(
        _CONFLICT,
        f"is {seq_len}, more than model.config.max_position_embeddings={most}; shorten it or raise that",
    )


def _decay(
    schedule: Any, decay_steps: int | None, decay_power: float | None, warmup: int, *stops: int | None
) -> _Wrong | None:
    by_points = isinstance(schedule, list)
    if not by_points and schedule != "constant" and all(stop is None for stop in stops):
        return _Wrong(
            _NO_STOP,
            f"is {schedule}, which decays, but there is no end; set train.max_steps, train.max_samples or "
            "train.max_tokens, or train.schedule=constant",
        )
    if schedule == "wsd" and decay_steps is None:
        return _Wrong(
            MISSING, "is wsd, but train.decay_steps is null; set the number of steps that the decay takes"
        )
    if schedule == "power" and decay_power is None:
        return _Wrong(MISSING, "is power, but train.decay_power is null; set the exponent of the decay")
    shown = show(schedule) if by_points else schedule
    for name, value, of in (("decay_steps", decay_steps, "wsd"), ("decay_power", decay_power, "power")):
        if schedule != of and value is not None:
            return _Wrong(
                _CONFLICT, f"is {shown}, but train.{name}={value} is for {of} only; set it to null"
            )
    if not by_points:
        return None
    if warmup:
        return _Wrong(
            _CONFLICT,
            f"is {shown}, which is the whole schedule, and train.warmup_steps={warmup}; set it to 0, and "
            "write the warm-up as the first points",
        )
    return _order_of_points([tokens for tokens, _ in schedule])


def _order_of_points(tokens: list[int]) -> _Wrong | None:
    for earlier, later in itertools.pairwise(tokens):
        if later < earlier:
            return _Wrong(
                "config.invalid_value",
                f"has a point at {later} tokens after one at {earlier}; write the points in their order",
            )
    if often := [each for each in tokens if tokens.count(each) > 2]:
        return _Wrong(
            _DUPLICATE,
            f"has {tokens.count(often[0])} points at {often[0]} tokens; a jump has two, the factor before it "
            "and the factor after it",
        )
    return None


def _parallel(parallel: Any, numerics: str) -> _Wrong | None:
    if parallel in ("auto", "replicate") or numerics != "invariant":
        return None
    return _Wrong(
        _CONFLICT,
        f"is {show(parallel)}, and train.numerics=invariant, which needs the whole gradient on every "
        "worker; set train.numerics=fast, or train.parallel=replicate",
    )


def _kernels(kernels: str, compiled: str, numerics: str, use_gpu: bool, factory: str | None) -> _Wrong | None:
    if kernels != "liger":
        return None
    if not use_gpu or numerics == "invariant" or compiled == "blocks" or factory is not None:
        made = "model.factory" if factory is not None else "transformers"
        return _Wrong(
            _CONFLICT,
            "is liger, which needs a model of transformers on GPUs, fast numerics and blocks that are not "
            f"compiled; the model is made by {made}, cluster.use_gpu={str(use_gpu).lower()}, "
            f"train.numerics={numerics} and train.compile={compiled}; set it to auto",
        )
    return None


# The arguments of the built-in objective: the values that each may have, and how that is said.
_CAUSAL_LM: dict[str, tuple[Callable[[float], bool], str]] = {
    "z_loss": (lambda value: value >= 0, "a number >= 0"),
    "label_smoothing": (lambda value: 0 <= value < 1, "a number >= 0 and < 1"),
    "logit_softcap": (lambda value: value > 0, "a number > 0"),
    "teacher_weight": (lambda value: 0 < value <= 1, "a number > 0 and <= 1"),
    "temperature": (lambda value: value > 0, "a number > 0"),
}
_TEACHER, _OF_TEACHER = "teacher", ("teacher_weight", "temperature")


def _objective_args(
    arguments: dict[str, Any], objective: str, frozen: dict[str, dict[str, Any]]
) -> _Wrong | None:
    if objective != BUILT_IN:
        return None
    teacher = arguments.get(_TEACHER)
    if teacher is not None and teacher not in frozen:
        return _Wrong(
            _CONFLICT,
            f"gives teacher={show(teacher)}, and model.frozen has {', '.join(frozen) or 'no model'}; name "
            "one of model.frozen",
        )
    for name, value in arguments.items():
        if name == _TEACHER and teacher is not None:
            continue
        if name not in _CAUSAL_LM:
            takes = ", ".join((*_CAUSAL_LM, _TEACHER))
            return _Wrong(
                "config.unknown_key",
                f"names {show(name)}, and {BUILT_IN} takes {takes}; leave it out, or set train.objective",
            )
        if name in _OF_TEACHER and teacher is None:
            return _Wrong(MISSING, f"gives {name}, and no teacher; set teacher to a name of model.frozen")
        is_valid, expected = _CAUSAL_LM[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not is_valid(value):
            return _Wrong("config.invalid_value", f"gives {name}={show(value)}; expected {expected}")
    return None


def _preferences(sources: list[Any]) -> _Wrong | None:
    found = sources_problem(sources)
    return None if found is None else _Wrong(*found)


def _packing_of_preferences(mode: str, long_document: str, sources: list[Any]) -> _Wrong | None:
    found = packing_problem(mode, long_document, sources)
    return None if found is None else _Wrong(*found)


def _objective_of_preferences(objective: str, sources: list[Any]) -> _Wrong | None:
    found = objective_problem(objective, sources)
    return None if found is None else _Wrong(*found)


def _parts_of_preferences(parts: dict[str, Any], sources: list[Any]) -> _Wrong | None:
    found = eval_parts_problem(parts, sources)
    return None if found is None else _Wrong(*found)


def _optimizer_args(arguments: dict[str, Any], optimizer: str) -> _Wrong | None:
    found = optimizer_args_problem(arguments, optimizer)
    return None if found is None else _Wrong(*found)


def _betas(betas: Any, optimizer: str, groups: list[Any]) -> _Wrong | None:
    found = adamw_only_problem(list(betas), [0.9, 0.95], optimizer, groups)
    return None if found is None else _Wrong(*found)


def _eps(eps: float, optimizer: str, groups: list[Any]) -> _Wrong | None:
    found = adamw_only_problem(eps, 1e-8, optimizer, groups)
    return None if found is None else _Wrong(*found)


def _param_groups(groups: list[Any], optimizer: str) -> _Wrong | None:
    found = group_optimizer_problem(groups, optimizer)
    return None if found is None else _Wrong(*found)


def _range(num_workers: int | list[int]) -> _Wrong | None:
    if isinstance(num_workers, int) or num_workers[0] <= num_workers[1]:
        return None
    return _Wrong(
        "config.invalid_value",
        f"is {num_workers}, the minimum above the maximum; write [{num_workers[1]}, {num_workers[0]}]",
    )


def _one_skip(skip_steps: int | None, skip_samples: int | None) -> _Wrong | None:
    if skip_steps is None or skip_samples is None:
        return None
    return _Wrong(_CONFLICT, f"is {skip_steps} and resume.skip_samples={skip_samples}; give one of them")


def _restart(
    restart_sources: list[str], data: str, sources: list[Any], steps: int | None, samples: int | None
) -> _Wrong | None:
    names = [source.get("name") for source in sources]
    if unknown := [name for name in restart_sources if name not in names]:
        return _Wrong(
            "config.unknown_source",
            f"names {show(unknown)}, the sources are {show(names)}; name these, or leave it out",
        )
    if twice := sorted({name for name in restart_sources if restart_sources.count(name) > 1}):
        return _Wrong(_DUPLICATE, f"names {show(twice)} more than once; name each source once")
    if restart_sources and data == "restart":
        return _Wrong(
            _CONFLICT, "is given, and resume.data=restart, which restarts all sources; leave one of them out"
        )
    if restart_sources and (data == "skip" or steps is not None or samples is not None):
        return _Wrong(_CONFLICT, "is given together with a skip; restart at one start, skip at the next")
    return None


def _mode(data: str, skip_steps: int | None, skip_samples: int | None) -> _Wrong | None:
    if data == "restart" and (skip_steps is not None or skip_samples is not None):
        return _Wrong(
            _CONFLICT, "is restart, and a skip is given, too; restart at one start, skip at the next"
        )
    if data == "skip" and skip_steps is None and skip_samples is None:
        return _Wrong(
            MISSING, "is skip, without a number of samples; set resume.skip_steps or resume.skip_samples"
        )
    return None


def _one_interval(every_steps: int | None, every_tokens: int | None) -> _Wrong | None:
    if every_steps is None or every_tokens is None:
        return None
    return _Wrong(
        _CONFLICT, f"is {every_steps}, and eval.every_tokens is {every_tokens}, too; leave one of them out"
    )


def _something_held_out(
    parts: dict[str, Any],
    every_steps: int | None,
    every_tokens: int | None,
    at_end: bool,
    holdout: float,
    sources: list[Any],
) -> _Wrong | None:
    is_wanted = at_end or every_steps is not None or every_tokens is not None
    reads_holdout = not parts or any(part.get("holdout") for part in parts.values())
    shares = [holdout if source.get("holdout") is None else source["holdout"] for source in sources]
    if not is_wanted or not reads_holdout or any(shares):
        return None
    return _Wrong(
        NOTHING_HELD_OUT,
        "evaluates the hold-out, and data.holdout=0 for all sources: nothing is held out; set data.holdout "
        "(only a new run can), or name other sources in eval.parts",
    )


def _best_by(best_by: str, parts: dict[str, Any], *when: int | bool | None) -> _Wrong | None:
    if best_by == "loss":
        return None
    names, part = list(parts) or ["holdout"], best_by.removeprefix("eval.").removesuffix(".loss")
    if part not in names:
        return _Wrong(
            "config.unknown_part",
            f"is {best_by}, and eval.parts has {', '.join(names)}; name one of these",
        )
    if not any(when):
        return _Wrong(MISSING, f"is {best_by}, and nothing is evaluated; set eval.every_steps")
    return None


def _eval_parts(parts: dict[str, Any], transforms: Any) -> _Wrong | None:
    for name, part in parts.items():
        holdout, sources = part.get("holdout"), part.get("sources")
        if (holdout is None) == (sources is None):
            return _Wrong(
                _CONFLICT,
                f"has a part {name} with {'both' if holdout else 'neither'} of holdout and sources; give it "
                "one of them",
            )
        if sources is None:
            continue
        if kept := [str(source.get("name")) for source in sources if source.get("holdout")]:
            return _Wrong(
                _CONFLICT,
                f"has a holdout for {', '.join(kept)} of part {name}, which is evaluated whole; leave it out",
            )
        checks = (_each_source_once, _weights, _loss_of_texts, _code_paths)
        for wrong in (*(check(sources) for check in checks), _transform_fields(sources, transforms)):
            if wrong is not None:
                return _Wrong(wrong.code, f"{wrong.text} (part {name})")
    return None


_STOPS = ("train.max_steps", "train.max_samples", "train.max_tokens")
_RULES = (
    _Between(fields=("data.sources",), check=_each_source_once),
    _Between(fields=("data.sources",), check=_weights),
    _Between(fields=("data.on_end", "data.sources", *_STOPS), check=_repeating),
    _Between(fields=("data.sources",), check=_loss_of_texts),
    _Between(fields=("data.sources",), check=_preferences),
    _Between(fields=("pack.mode", "pack.long_document", "data.sources"), check=_packing_of_preferences),
    _Between(fields=("train.objective", "data.sources"), check=_objective_of_preferences),
    _Between(fields=("eval.parts", "data.sources"), check=_parts_of_preferences),
    _Between(fields=("data.sources",), check=_code_paths),
    _Between(fields=("data.sources", "data.transforms"), check=_transform_fields),
    _Between(fields=("data.num_epochs", *_STOPS), check=_endless),
    _Between(fields=("data.window_bytes", "data.fragment_bytes"), check=_window),
    _Between(fields=("model.config", "model.pretrained", "model.factory"), check=_one_model),
    _Between(fields=("model.config",), check=_model_type),
    _Between(fields=("model.frozen",), check=_frozen_models),
    _Between(fields=("model.lora", "model.pretrained", "model.init_from"), check=_lora_base),
    _Between(fields=("model.factory_args", "model.factory"), check=_factory_args),
    _Between(fields=("monitor.loggers",), check=_each_logger_once),
    _Between(fields=("eval.every_steps", "eval.every_tokens"), check=_one_interval),
    _Between(fields=("eval.parts", "data.transforms"), check=_eval_parts),
    _Between(
        fields=(
            *("resume.keep_best_by", "eval.parts"),
            *("eval.every_steps", "eval.every_tokens", "eval.at_end"),
        ),
        check=_best_by,
    ),
    _Between(
        fields=(
            *("eval.parts", "eval.every_steps", "eval.every_tokens", "eval.at_end"),
            *("data.holdout", "data.sources"),
        ),
        check=_something_held_out,
    ),
    _Between(
        fields=(
            *("model.attn_implementation", "model.factory", "train.numerics", "cluster.use_gpu"),
            *("pack.document_attention", "pack.mode"),
        ),
        check=_attention,
    ),
    _Between(fields=("pack.seq_len", "model.config"), check=_positions),
    _Between(
        fields=("train.schedule", "train.decay_steps", "train.decay_power", "train.warmup_steps", *_STOPS),
        check=_decay,
    ),
    _Between(fields=("train.objective_args", "train.objective", "model.frozen"), check=_objective_args),
    _Between(fields=("train.optimizer_args", "train.optimizer"), check=_optimizer_args),
    _Between(fields=("train.betas", "train.optimizer", "train.param_groups"), check=_betas),
    _Between(fields=("train.eps", "train.optimizer", "train.param_groups"), check=_eps),
    _Between(fields=("train.param_groups", "train.optimizer"), check=_param_groups),
    _Between(fields=("train.parallel", "train.numerics"), check=_parallel),
    _Between(
        fields=(
            *("train.kernels", "train.compile", "train.numerics", "cluster.use_gpu"),
            "model.factory",
        ),
        check=_kernels,
    ),
    _Between(fields=("cluster.num_workers",), check=_range),
    _Between(fields=("resume.data", "resume.skip_steps", "resume.skip_samples"), check=_mode),
    _Between(fields=("resume.skip_steps", "resume.skip_samples"), check=_one_skip),
    _Between(
        fields=(
            "resume.restart_sources",
            *("resume.data", "data.sources", "resume.skip_steps", "resume.skip_samples"),
        ),
        check=_restart,
    ),
)
