"""The configurations of a run's attempts, and the data that it was trained on."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.field_rules import in_todays_fields, nested
from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt.survey import Survey, require_frozen
from orchestrator.data.code_process import call, names_code
from orchestrator.data.dataset import prepare_trained
from orchestrator.data.spec import DataSpec
from orchestrator.errors import DataIdentityError, RefusedError
from orchestrator.history.journal.event_kinds import EventKind
from orchestrator.inspect.audit.step_walk import accepted_text


def attempt_configs(uri: str, seen: Survey) -> list[JobConfig]:
    """The configurations of the attempts of the run at `uri`, oldest first, under the fields of this version.
    Raises `RefusedError` if none has begun.
    """
    events = [event for event in seen.journal.events if event.kind == EventKind.ATTEMPT]
    if not events:
        raise RefusedError(
            f"{uri}: no attempt of this run has begun yet, so it has read no data", code="run.not_begun"
        )
    return [parse_config(nested(in_todays_fields(event.fields["config"]))) for event in events]


def trained_data(store: RunStore, uri: str, seen: Survey) -> DataSpec:
    """The data that the run was trained on, as its encoders made them. Raises `DataIdentityError` if files
    have changed since, `RefusedError` if no attempt has begun.
    """
    configs = attempt_configs(uri, seen)
    try:
        runs_code = any(map(names_code, configs))
        spec = call(runs_code, prepare_trained, configs[-1], store.storage, seen.sources)
    except DataIdentityError as error:
        raise DataIdentityError(f"{error}{accepted_text(seen)}", code=error.code) from error
    require_frozen(seen, spec)
    # also of sources that the newest configuration does not have any more
    loss: dict[str, str] = {s.name: s.loss for config in configs for s in config.data.sources}
    return replace(spec, settings=replace(spec.settings, loss=loss)).made_by(seen.encoders)
