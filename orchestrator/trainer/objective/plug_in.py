"""Trains with a user's objective: calls it, and checks what it returns.

The model that it gets does what the configuration says: a plain `model(batch.input_ids)` attends within
documents if `pack.document_attention` is true, and runs in bfloat16 under `train.precision: bf16`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from orchestrator.errors import ConfigError, OrchestratorError, TrainingError
from orchestrator.history.metrics.declared import RESERVED
from orchestrator.objectives import Mean, StepContext, Terms
from orchestrator.trainer.comm.interruptible import refusing
from orchestrator.trainer.model.build_model import seed_micro_batch
from orchestrator.trainer.model.factory_output import may_not_repeat, without_weights
from orchestrator.trainer.model.model_call import completed_inputs, input_names
from orchestrator.trainer.objective.micro_batches import (
    NO_MODELS,
    NumberedMicroBatch,
    Objective,
    StepPlace,
    empty_micro_batch,
)
from orchestrator.user_function import described, find_function

_CPU = torch.device("cpu")
_TERMS = "objective.terms"
_CALL = "objective.call"
_IMPURE = "objective.impure"
_CHECK_EVERY = 1000
_NAMED = 5
_COUNT = attrgetter("_version")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*").fullmatch


class PlugIn(Objective):
    """The function of `train.objective`."""

    metric_names: tuple[str, ...] = ()

    def __init__(
        self,
        path: str,
        arguments: Mapping[str, Any],
        seed: int,
        precision: str,
        by_document: bool,
        seq_len: int,
        frozen: Mapping[str, nn.Module] = NO_MODELS,
        rows_per_sample: int = 1,
    ) -> None:
        """`frozen`: as in `objective_of`.

        Raises `ConfigError` if there is no function `path`, or if it does not take `arguments`.
        """
        self._path, self._arguments = path, dict(arguments)
        self._function = find_function("train.objective", path, "objective.not_callable", 3, self._arguments)
        self._seed, self._precision, self._by_document = seed, precision, by_document
        self._seq_len, self.frozen, self._rows_per_sample = seq_len, frozen, rows_per_sample
        self._tried = False
        self._watched = _Watched(frozen)

    @override
    def prepare(self, model: nn.Module) -> None:
        """Evaluates the objective, and learns the names of its metrics.

        A model without weights (meta device) is tried as `factory_output.try_forward` does it. An objective
        that needs values there can name its metrics in its attribute `metrics`. Raises `ConfigError` if the
        evaluation fails.
        """
        device = next(model.parameters()).device
        is_meta = device.type == "meta"
        micro, place = self.empty(_CPU if is_meta else device), StepPlace(step=1, consumed_tokens=0)
        names = getattr(self._function, "metrics", None)
        own = [device] if device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=own), without_weights() if is_meta else nullcontext():
                names = self.terms(model, micro, place).metrics
                if not is_meta:
                    self.check(model, micro, place)
        except OrchestratorError as error:
            raise ConfigError(str(error), code=error.code) from error
        except Exception as error:
            if not is_meta or names is None:
                more = (
                    "; it was tried without the values of weights: do not read values of tensors, or name "
                    "its metrics in its attribute `metrics`"
                )
                raise ConfigError(
                    f"train.objective={self._path} fails for a sample of {self._seq_len} tokens: "
                    f"{type(error).__name__}: {error}{more if is_meta else ''}",
                    code="objective.fails",
                ) from error
        self.metric_names, self._tried = tuple(sorted(names)), True

    @override
    def check(self, model: nn.Module, micro: NumberedMicroBatch, place: StepPlace) -> None:
        """Evaluates the objective twice more in the first step, and in one of 1,000 steps after it."""
        if place.step % _CHECK_EVERY != 1:
            return
        before = self._versions(model)
        collective = self._wrong(
            "calls a collective, and the ranks evaluate it a different number of times; leave sums over "
            "ranks to the metrics",
            _IMPURE,
        )
        with nullcontext() if _is_sharded(model) else refusing(collective):
            first = _values(self.terms(model, micro, place))
        second = _values(self.terms(model, micro, place))
        now = self._versions(model)
        changed = [name for name, version in now.items() if before.get(name, version) != version]
        if changed:
            raise self._changes(changed, place)
        tolerance = float(getattr(self._function, "tolerance", 0.0))
        for name, value in first.items():
            again = second.get(name, math.nan)
            is_same = value == again or (math.isnan(value) and math.isnan(again))
            if not is_same and not math.isclose(value, again, rel_tol=tolerance):
                raise self._wrong(
                    f"gives {name}={value!r} and then {again!r} for the same samples; compute it from the "
                    "model, the samples and the context alone, or state the relative difference of kernels "
                    "that are not bit-stable in its attribute `tolerance`",
                    _IMPURE,
                )

    @override
    def terms(self, model: nn.Module, micro: NumberedMicroBatch, place: StepPlace) -> Terms:
        batch = micro.batch
        device = batch.input_ids.device
        seed = seed_micro_batch(self._seed, micro.first_sample)
        context = StepContext(
            step=place.step,
            consumed_tokens=place.consumed_tokens,
            generator=torch.Generator(device).manual_seed(seed),
            frozen=MappingProxyType(self.frozen),
        )
        kind = device.type
        autocast = torch.autocast(kind, torch.bfloat16) if self._precision == "bf16" else nullcontext()
        written = self._watched.begin(model)
        with autocast, self._inputs_completed(model, micro), self._frozen_completed(micro):
            try:
                found = self._function(model, batch, context, **self._arguments)
            except (Exception, SystemExit) as error:
                if not self._tried or may_not_repeat(error):
                    raise
                if changed := self._watched.changed(written):
                    raise self._changes(changed, place) from error
                raised = f"raised in step {place.step}: {described(error)}"
                raise self._wrong(raised, "objective.fails") from error
        if changed := self._watched.changed(written):
            raise self._changes(changed, place)
        return self._checked(found, tuple(batch.input_ids.shape))

    @override
    def empty(self, device: torch.device) -> NumberedMicroBatch:
        # its labels are targets: an objective that divides by their number must not give NaN, since NaN times
        # 0 is NaN
        return empty_micro_batch(device, self._seq_len, label=0, rows=self._rows_per_sample)

    @override
    def leave(self) -> None:
        self._watched.forget()

    def _versions(self, model: nn.Module) -> dict[str, tuple[int, int]]:
        """Identifies each tensor of the models and how often it was written to."""
        found = _versions(model)
        for of, frozen in self.frozen.items():
            found |= {f"frozen[{of!r}].{name}": version for name, version in _versions(frozen).items()}
        return found

    @contextmanager
    def _frozen_completed(self, micro: NumberedMicroBatch) -> Iterator[None]:
        """`_inputs_completed` for each of the frozen models, which need not be called."""
        with ExitStack() as stack:
            for model in self.frozen.values():
                stack.enter_context(self._inputs_completed(model, micro, must_be_called=False))
            yield

    @contextmanager
    def _inputs_completed(
        self, model: nn.Module, micro: NumberedMicroBatch, must_be_called: bool = True
    ) -> Iterator[None]:
        """Within the block, `model(input_ids)` is called with the micro-batch's document borders and padding.

        Raises `TrainingError` if these are not known for what the model is called with, or if the model is
        not called.
        """
        batch, num_calls = micro.batch, 0
        documents = batch.document_ids.long() if self._by_document else None
        is_padding = batch.document_ids < 0 if micro.has_padding else None

        def complete(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            del module
            nonlocal num_calls
            num_calls += 1
            if any(name in kwargs for name in input_names(model)) or len(args) > 1:
                return args, kwargs  # the objective gives them by itself
            ids = args[0] if args else kwargs.get("input_ids")
            if not isinstance(ids, Tensor) or ids.shape != batch.input_ids.shape:
                shape = tuple(ids.shape) if isinstance(ids, Tensor) else ids
                if documents is None:
                    return args, kwargs
                raise self._wrong(
                    f"calls the model with input_ids {shape} of a micro-batch "
                    f"{tuple(batch.input_ids.shape)}, and pack.document_attention=true: it is not known "
                    "which documents these belong to; call the model with all of batch.input_ids, or give it "
                    f"{' and '.join(input_names(model))}",
                    _CALL,
                )
            return args, {**kwargs, **more}

        with completed_inputs(model, documents, is_padding) as more:
            handle = model.register_forward_pre_hook(complete, with_kwargs=True, prepend=True)
            try:
                yield
            finally:
                handle.remove()
        if documents is not None and must_be_called and not num_calls:
            raise self._wrong(
                "calls only parts of the model, and pack.document_attention=true: document borders reach "
                "them only through the model itself; call the model, or set pack.document_attention=false",
                _CALL,
            )

    def _checked(self, found: object, shape: tuple[int, ...]) -> Terms:
        """Returns the terms. Raises `TrainingError` if they are not as documented."""
        if not isinstance(found, Terms):
            kind = type(found).__name__
            raise self._wrong(f"returned {kind}; return orchestrator.objectives.Terms", _TERMS)
        loss = found.loss_sum
        if not isinstance(loss, Tensor) or loss.ndim:
            kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise self._wrong(
                f"returned a loss_sum of {kind}; return a scalar tensor, the sum over all tokens", _TERMS
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise self._wrong(
                "returned a loss_sum that depends on no trained parameter; compute it from the output of the "
                "model",
                _TERMS,
            )
        for name, mean in found.metrics.items():
            if not _NAME(name) or name in RESERVED:
                raise self._wrong(
                    f"returned a metric {name!r}; give it a name of letters, digits and _ that no metric of "
                    "every run has (docs/metrics.md)",
                    _TERMS,
                )
            is_mean = isinstance(mean, Mean) and _is_number(mean.sum) and _is_number(mean.count)
            if is_mean and isinstance(mean.count, int | float) and mean.count < 0:
                raise self._wrong(
                    f"returned the count {mean.count} of metric {name!r}; return a count of at least 0",
                    _TERMS,
                )
            if not is_mean:
                raise self._wrong(
                    f"returned {mean!r:.100} as metric {name!r}; return a Mean of two numbers", _TERMS
                )
        names = tuple(sorted(found.metrics))
        if self._tried and names != self.metric_names:
            raise self._wrong(
                f"returned the metrics {list(names)}, and {list(self.metric_names)} before; return the same "
                "ones for every micro-batch (a Mean with the count 0 where one has no value)",
                _TERMS,
            )
        if found.per_token is not None and tuple(found.per_token.shape) != shape:
            raise self._wrong(
                f"returned per_token of shape {tuple(found.per_token.shape)}; return one number for each "
                f"token, {shape}",
                _TERMS,
            )
        return found

    def _changes(self, names: Sequence[str], place: StepPlace) -> TrainingError:
        return self._wrong(
            f"changes the model's {', '.join(names[:_NAMED])} in step {place.step}; it must change no "
            "weights and buffers",
            _IMPURE,
        )

    def _wrong(self, what: str, code: str) -> TrainingError:
        return TrainingError(f"train.objective={self._path} {what}", code=code)


class _Watched:
    """Notices in-place writes to the tensors of a model, by the counts that autograd keeps of them.

    `begin` and `changed` take 0.1 µs for each tensor. Writes through `.data` are not counted.
    """

    def __init__(self, frozen: Mapping[str, nn.Module]) -> None:
        """`frozen`: models whose tensors count, too."""
        self._frozen = frozen
        self.forget()

    def forget(self) -> None:
        """Holds no tensor any more."""
        self._model: nn.Module | None = None
        self._tensors: dict[str, Tensor] = {}

    def begin(self, model: nn.Module) -> list[int]:
        """Returns the count of each tensor of `model`, for `changed`."""
        if self._model is not model:
            self._model = model
            self._tensors = dict(_named_tensors(model))
            for of, frozen in self._frozen.items():
                self._tensors |= {f"frozen[{of!r}].{name}": each for name, each in _named_tensors(frozen)}
        return self._counts()

    def changed(self, before: Sequence[int]) -> list[str]:
        """Returns the names of the tensors that were written to since `begin`."""
        now = self._counts()
        if now == before:
            return []
        return [name for name, a, b in zip(self._tensors, before, now, strict=True) if a != b]

    def _counts(self) -> list[int]:
        return list(map(_COUNT, self._tensors.values()))


def is_before_the_step(error: TrainingError) -> bool:
    """Whether the objective failed before anything of the state was changed."""
    return (error.code or "").startswith("objective.") and error.code != _IMPURE


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _values(terms: Terms) -> dict[str, float]:
    values: dict[str, Any] = {"loss_sum": terms.loss_sum}
    for name, mean in terms.metrics.items():
        values |= {f"{name}.sum": mean.sum, f"{name}.count": mean.count}
    return {name: float(torch.as_tensor(value).detach()) for name, value in values.items()}


def _versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Identifies each tensor of the model and how often it was written to."""
    tensors = _named_tensors(model)
    return {name: (id(tensor), tensor._version) for name, tensor in tensors if not _is_rows(tensor)}


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())


def _is_rows(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def _is_sharded(model: nn.Module) -> bool:
    return any(map(_is_rows, model.parameters()))
