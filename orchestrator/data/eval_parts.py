"""The data that a run evaluates (`eval.parts`).

A part is the run's hold-out, or has sources of its own. These are frozen in the run's folder
`eval/<part>/` as a run freezes its data, and are read once, in the order of the first epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from orchestrator.config.schema import HOLDOUT
from orchestrator.data.code_process import call, names_code
from orchestrator.data.frozen import (
    EVAL_FOLDER,
    EVAL_IDENTITY,
    TOKENIZER_FOLDER,
    frozen_sources,
    read_frozen,
)
from orchestrator.data.spec import DataSpec
from orchestrator.data.tokens.tokenizer_files import is_there
from orchestrator.errors import DataIdentityError, naming_fields
from orchestrator.json_form import SealError, decode, encode, seal, unseal
from orchestrator.planning.resume.identity import RunIdentity, compare
from orchestrator.storage.files import Storage
from orchestrator.storage.open import join

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig

def with_parts(job: JobConfig, storage: Storage, spec: DataSpec) -> DataSpec:
    """Returns the run's data with the parts that have sources of their own, frozen or as they are now.

    Raises as `data.dataset.prepare_data`, and `DataIdentityError` if a part is not as it was frozen.
    """
    return replace(spec, evaluated={name: _prepared(job, storage, name) for name in _own(job)})


def with_frozen_parts(job: JobConfig, storage: Storage, spec: DataSpec) -> DataSpec:
    """Returns the run's data with the parts frozen. Raises as `with_parts`."""
    from orchestrator.data.dataset import freeze_data

    found = dict[str, DataSpec]()
    for name in _own(job):
        part, at = spec.evaluated.get(name), _folder(storage, name)
        if part is None or part.unfrozen is None:
            part = _prepared(job, storage, name)
        if part.unfrozen is not None:
            at.write(EVAL_IDENTITY, seal(encode(part.run_identity)))
            with _naming(name):
                part = freeze_data(_job_of(job, name), at, part)
        found[name] = part
    return replace(spec, evaluated=found)


def eval_specs(job: JobConfig, spec: DataSpec) -> dict[str, DataSpec]:
    """The data of each part by name; empty if nothing is evaluated. `spec`: the run's data.

    Raises `RefusedError` if a part is the hold-out and nothing is held out.
    """
    if not job.eval.is_wanted:
        return {}
    if not job.eval.parts:
        return {HOLDOUT: spec.held_out()}
    return {
        name: spec.held_out() if part.holdout else spec.evaluated[name]
        for name, part in job.eval.parts.items()
    }


def _own(job: JobConfig) -> list[str]:
    """The parts with sources of their own."""
    return [name for name, part in job.eval.parts.items() if part.sources is not None]


def _folder(storage: Storage, name: str) -> Storage:
    return storage.beside(join(storage.root, EVAL_FOLDER, name))


def _job_of(job: JobConfig, name: str) -> JobConfig:
    """A job whose data are those of the part, each read once."""
    sources = job.eval.parts[name].sources
    assert sources is not None, "the hold-out is part of the run's own data"
    data = {
        "sources": tuple(source.model_copy(update={"max_epochs": None}) for source in sources),
        "holdout": 0.0,
        "num_epochs": 1,
        "on_end": "drop",
        "refresh": None,
    }
    anew = {"data": "continue", "restart_sources": (), "skip_steps": None, "skip_samples": None}
    return job.model_copy(
        update={
            "data": job.data.model_copy(update=data),
            "resume": job.resume.model_copy(update=anew),
        }
    )


def _prepared(job: JobConfig, storage: Storage, name: str) -> DataSpec:
    from orchestrator.data.dataset import prepare_data

    own, at = _job_of(job, name), _folder(storage, name)
    with _naming(name):
        if frozen_sources(at) is None:
            own = _with_frozen_tokenizer(own, storage)
            return call(names_code(own), prepare_data, own, None)
        try:
            spec = call(names_code(own), prepare_data, own, at)
        except DataIdentityError as error:
            *what, _ = str(error).splitlines() if "\n" in str(error) else (str(error), "")
            raise _changed(name, " ".join(what)) from error  # its last line advises what only sources can do
        try:
            was = decode(RunIdentity, unseal(at.read(EVAL_IDENTITY)))
        except (FileNotFoundError, SealError) as error:
            raise DataIdentityError(
                f"{at.root}/{EVAL_IDENTITY} is gone or damaged ({error}); restore it, or give "
                f"eval.parts.{name} another name",
                code="data.eval_identity",
            ) from error
        if refusals := compare(was, spec.run_identity, job.resume.accept_changed):
            raise _changed(name, "; ".join(refusal.text for refusal in refusals))
    return spec


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Within the block, errors about `data.sources` name the sources of the part instead."""
    with naming_fields(f"eval.parts.{name}", {"data.sources": f"eval.parts.{name}.sources"}):
        yield


def _with_frozen_tokenizer(job: JobConfig, storage: Storage) -> JobConfig:
    """The job with the run's copy of its tokenizer, if none is where the job names the run's own."""
    frozen, name = read_frozen(storage), job.data.tokenizer
    if frozen is None or name != frozen.record.tokenizer or is_there(name):
        return job
    copy = join(storage.root, TOKENIZER_FOLDER)
    return job.model_copy(update={"data": job.data.model_copy(update={"tokenizer": copy})})


def _changed(name: str, what: str) -> DataIdentityError:
    return DataIdentityError(
        f"the data of eval.parts.{name} are not those that were frozen: {what}; put them back, or "
        "give the part another name, under which it is frozen anew",
        code="data.eval_changed",
    )
