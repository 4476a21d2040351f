"""The data that a run was trained on, and a walk over some of its steps in the caller's process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.field_rules import in_todays_fields, nested
from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt.survey import Survey, require_frozen
from orchestrator.data.code_process import call, names_code
from orchestrator.data.dataset import prepare_trained
from orchestrator.data.spec import DataSpec
from orchestrator.errors import DataIdentityError, RefusedError
from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.step_names import step_name
from orchestrator.inspect.audit.history_parts import accepting, history_of
from orchestrator.inspect.audit.reference.reference_packing import ReferencePacker
from orchestrator.inspect.audit.reference.reference_windows import ReferenceWindows
from orchestrator.inspect.audit.stream_recheck import PartWalk, StepDifference, WalkedStep
from orchestrator.records.steps import StepRecord


class Walk:
    """The stream beside the records, from the nearest known cursor on."""

    def __init__(
        self,
        spec: DataSpec,
        seen: Survey,
        records: tuple[StepRecord, ...],
        first: int,
        packer: type[ReferencePacker] = ReferencePacker,
        windows: type[ReferenceWindows] = ReferenceWindows,
    ) -> None:
        """`first`: the first record that is asked for. `packer` makes the samples, `windows` those of whole
        documents.
        """
        assert records == seen.lineage.records, "the history's own"
        self._spec, self._seen, self._first, self._packers = spec, seen, first, (packer, windows)
        self._walk = self._over(range(first, first))

    def _over(self, wanted: range) -> PartWalk:
        return PartWalk(self._spec, history_of(self._spec, self._seen).part(wanted), *self._packers)

    def differences(self, wanted: range) -> Iterator[dict[str, Any]]:
        """The differences of the wanted steps, which begin with the first; see `PartWalk.differences`. Raises
        `DataIdentityError` as `named` does.
        """
        assert wanted.start == self._first, "it has begun"
        self._walk = self._over(wanted)
        for difference in self._walk.differences():
            yield named(self._seen, difference)

    @property
    def newest(self) -> WalkedStep | None:
        """The step that was walked last."""
        return self._walk.newest

    def packer(self, source: str) -> ReferencePacker | ReferenceWindows:
        """The packer of a source's samples."""
        return self._walk.packer(source)


def named(seen: Survey, difference: StepDifference) -> dict[str, Any]:
    """Returns the difference with the step's name. Raises `DataIdentityError` if files may have changed under
    the step's attempt (data rule 27).
    """
    name = step_name(seen.lineage.records, difference.index)
    if difference.accepted:
        raise DataIdentityError(
            f"nothing can be shown of step {name}: {difference.reason}" + accepted_text(seen),
            code="audit.accepted_change",
        )
    return {"step": name, "reason": difference.reason}


def accepted_text(seen: Survey) -> str:
    """The part of the history that can be audited although an attempt was configured to continue with changed
    files, as the end of a sentence. Empty if no such attempt trained.
    """
    records, accepted = seen.lineage.records, accepting(seen)
    index = next((i for i, record in enumerate(records) if record.attempt in accepted), None)
    if index is None:
        return ""
    before = (
        f"what was trained before it can be audited by --steps :{step_name(records, index - 1)}, with the "
        "files as they were when the run was started"
        if index
        else "nothing was trained before it"
    )
    return (
        f". Attempt {records[index].attempt} was configured to continue with changed files "
        f"(resume.accept_changed); {before}"
    )


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
