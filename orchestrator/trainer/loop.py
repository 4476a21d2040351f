"""The worker's training loop: join a group, agree on the state, train until the generation ends, repeat.

It uses the interfaces `Membership`, `Feed` and `StateFiles`.
"""

from __future__ import annotations

import logging
import math
import resource
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from orchestrator.checkpoint.files.part_writer import PartWriter
from orchestrator.config.sections import BUILT_IN
from orchestrator.errors import TrainingError, UnsavedError
from orchestrator.faults import Hook, no_fault
from orchestrator.history.sentences import DOT, NO_CHANGE
from orchestrator.paused_gc import paused_gc
from orchestrator.planning import batches
from orchestrator.planning.digest import batch_digest
from orchestrator.planning.loss_policy import REWIND_CODES, window_of
from orchestrator.planning.schedule import learning_rate
from orchestrator.planning.state.memory import memory_every_steps
from orchestrator.records.membership import GenerationView, MemberState
from orchestrator.records.steps import BatchSlice, EvalRecord, LossHistory, StateKey, StepRange, StepRecord
from orchestrator.trainer.callback_process import FAILED_CLOSE_S, Callbacks
from orchestrator.trainer.comm.group import GenerationEnded, Group, LastSaveFailed, collective
from orchestrator.trainer.evaluation import EvalPart, Evaluator, is_due
from orchestrator.trainer.gradient.parallel import state_and_gradient
from orchestrator.trainer.interfaces.loop_interface import (
    BETWEEN,
    DONE,
    EVAL,
    FAILED,
    FEED_WAIT,
    FORMING,
    LEFT,
    LOAD,
    PHASE_LIMITS_S,
    SAVE_WAIT,
    STEP,
    STOPPED,
    Feed,
    Membership,
    Outcome,
    TrainJob,
    coming_ranges,
    next_range,
    step_limit_s,
)
from orchestrator.trainer.interfaces.step_summary import RankContribution, RankTerms, StepSummary
from orchestrator.trainer.memory_points.memory_point import MemoryPoints
from orchestrator.trainer.model.blocks import are_compiled, compiles
from orchestrator.trainer.model.build_model import pick_device, set_determinism
from orchestrator.trainer.model.compiled_kernels import copies
from orchestrator.trainer.model.model_flops import Utilisation
from orchestrator.trainer.objective.micro_batches import NO_LOSS, StepPlace, cut
from orchestrator.trainer.objective.objective import step_units
from orchestrator.trainer.objective.plug_in import is_before_the_step
from orchestrator.trainer.objective.token_losses import TokenLosses
from orchestrator.trainer.saving.save_machines import REFORM, SAVE, STOP, SaveTriggers, asked_for, carried_out
from orchestrator.trainer.saving.saver import Saver, Unsaved, await_saves
from orchestrator.trainer.state.sync_state import (
    Prepared,
    StateSources,
    apply_prepared,
    group_digest,
    sync_state,
)
from orchestrator.trainer.step_decision import StepRefused, skip_cause
from orchestrator.trainer.weights.state_tensors import StateFiles

_log = logging.getLogger(__name__)


def train(
    job: TrainJob,
    membership: Membership,
    feed: Feed,
    files: StateFiles,
    faults: Hook = no_fault,
    parts: Sequence[EvalPart] = (),
) -> Outcome:
    """Trains until the budget or data end, a stop is requested, or the run is over for this member.

    `parts` are those that `job.eval` evaluates.

    `faults(place, step, rank)` is called at these places:
    - `connecting`, `resharding`, `state_half_sent`, `state_half_received` and `joined`, with the label of the
      last finished step;
    - `step_begin`, `gradient_done`, `summary_received` and `applied`, with the label of the current step;
    - `evaluating`, with the label of the evaluated step, before each batch of an evaluation;
    - `staging_begun`, `staged` and `save_part_written`, in the threads of a save, with the step that is
      saved;
    - the places of `MemoryPoints`.

    Raises `TrainingError` if a step is wrong; no rank has applied that step. Errors of feed, membership and
    storage propagate.
    """
    return _Trainer(job, membership, feed, files, faults, parts).run()


class _StopRequested(Exception):  # noqa: N818  ends an evaluation; never leaves the loop
    """The coordinator asks for a stop."""


class _Trainer:
    """One member's training.

    `_prepared` is the step whose summary is awaited. `_records` are not yet acknowledged.
    """

    def __init__(
        self,
        job: TrainJob,
        membership: Membership,
        feed: Feed,
        files: StateFiles,
        faults: Hook,
        parts: Sequence[EvalPart],
    ) -> None:
        self._job, self._membership, self._feed, self._parts = job, membership, feed, parts
        self._files, self._faults = files, faults
        self._device = pick_device(job.device)
        set_determinism(job.invariant, self._device)
        with paused_gc():  # constructing the model imports its code
            self._state, self._gradient = state_and_gradient(job, self._device)
            self._token_losses = TokenLosses(job.sources, job.document_losses)
            self._gradient.token_losses = self._token_losses
            self._utilisation = Utilisation.of(
                self._state.model, job.row_len, job.train.precision, self._device
            )
        writer = PartWriter(files.parts, _log.warning, placed=files.placed)
        self._saver = Saver(membership, writer, self._device, faults)
        every = memory_every_steps(job.resume.memory_every_steps, self._state.sharded)
        self._memory = MemoryPoints(every, self._device, faults)
        self._callbacks = Callbacks(job.train.callbacks, job.run_uri, self._callback_failed)
        self._state.writable = self._writable
        self._prepared: Prepared | None = None
        self._records: list[StepRecord] = []
        self._unsaved = Unsaved()
        self._failed: TrainingError | None = None  # of the objective; it ends this member after a save
        self._has_stepped = self._has_noted_kernels = False
        self._all_warm = False  # every member of the group has done a step in its process
        self._end_of_data = False
        self._evaluated = -1  # the newest step that this generation, or one before it, has evaluated
        self._losses = LossHistory()  # before the state, if a policy needs it
        self._num_busy = 0  # ranks that were saving at the last step
        self._waited_s = 0.0  # for the batch of the current step
        self._step_began = time.monotonic()
        self._triggers = SaveTriggers(
            every_steps=job.resume.every_steps,
            every_minutes=job.resume.every_minutes,
            since_s=self._step_began,
        )

    def run(self) -> Outcome:
        """Trains until the end, as `train`.

        If it raises, threads that wait for storage may remain. They end with the process.
        """
        try:
            outcome = self._run()
        except BaseException:
            self._callbacks.end(FAILED, FAILED_CLOSE_S)
            raise
        self._callbacks.end(outcome.reason)
        self._saver.close()
        self._memory.close()
        return outcome

    def _run(self) -> Outcome:
        leaves: tuple[int, int] | None = None
        reason, unsaved = "start", False
        while True:
            self._saver.writable()  # a member that joins has staged what it saves
            self._saver.poll(self._state)
            self._membership.phase(STEP)
            state, prepared = self._state, self._prepared
            view = self._membership.join(
                MemberState(
                    key=state.key,
                    cursor=state.cursor if state.key is not None else None,
                    leaves=leaves,
                    prepared=prepared.key if prepared is not None else None,
                    saving=self._saver.saving,
                    records=tuple(self._records),
                    reason=reason,
                    holdings=(
                        *state.holdings(prepared.key if prepared is not None else None),
                        *self._memory.holdings(),
                    ),
                    unsaved=unsaved,
                )
            )
            if view is None and self._failed is not None:
                raise self._failed
            if view is None:
                return Outcome(reason=LEFT, key=state.key, cursor=state.cursor)
            formed = self._triggers.first if leaves is None else self._triggers.formed
            self._triggers = formed(view.step)
            leaves = (view.attempt, view.generation)
            try:
                return self._generation(view)
            except GenerationEnded as ended:
                reason, unsaved = str(ended), isinstance(ended, LastSaveFailed)
            _log.info("generation %d of attempt %d ended: %s", view.generation, view.attempt, reason)

    def _generation(self, view: GenerationView) -> Outcome:
        self._membership.phase(FORMING)
        with collective("reaching the store of rank 0"):
            self._faults("connecting", view.step, view.rank)
            store = self._membership.connect_store(view)
        limit_s, called_off = self._job.forming_limit_s, lambda: self._membership.control_requests(view).ended
        with (
            Group.formed(view, store, self._device, limit_s, called_off) as group,
            self._state.within(),
            self._memory.within(view, store),
        ):
            self._membership.when_ended(view, group.call_off)
            prepared, self._prepared = self._prepared, None
            self._end_of_data, self._evaluated = False, view.evaluated
            self._losses = view.losses or LossHistory()
            self._membership.phase(LOAD)
            sources = StateSources(
                files=self._files,
                copies=self._memory,
                loading=self._membership.loading,
                reset_optimizer=self._job.resume.optimizer == "reset",
            )
            digest, warm = self._job.config_digest, self._has_stepped
            self._all_warm = sync_state(
                group, self._state, digest, prepared, sources, self._faults, warm
            )
            self._memory.enter(self._state)
            self._membership.phase(STEP)
            self._allow(group)
            self._saver.prepare(self._state, view.rank)
            self._faults("joined", view.step, view.rank)
            self._callbacks.enter(view, self._state.cursor, self._records)
            self._leave_failed(group)
            self._feed.open(view, self._state.cursor)
            self._step_began, self._has_noted_kernels = time.monotonic(), False
            try:
                self._gradient.enter(view.rank, view.world_size)
                return self._train(group)
            except TrainingError as error:
                if not is_before_the_step(error):
                    raise
                # without the frames of the model, which hold FSDP2's groups
                self._failed = TrainingError(str(error), code=error.code)
            finally:
                self._gradient.leave()
        raise GenerationEnded(f"{self._failed}{DOT}{NO_CHANGE}")

    def _leave_failed(self, group: Group) -> None:
        """Saves the state if the objective of a member has failed, and ends that member with its error.

        The objective failed before the step changed anything, so all members together hold the whole state.
        The others continue as after any error of a worker. They try the step again. Raises what `_end_of`
        raises, and `GenerationEnded` on the others.
        """
        if self._job.train.objective == BUILT_IN:
            return
        rows = group.gather([int(self._failed is not None)], "agreeing on errors of the objective")
        failed = [rank for rank, (has_failed,) in enumerate(rows) if has_failed]
        if not failed:
            return
        ending = self._end_of(group, str(self._failed), "objective.fails")
        if self._failed is None:
            raise GenerationEnded(f"the objective failed on rank {', '.join(map(str, failed))}")
        raise TrainingError(str(ending), code=self._failed.code)

    def _train(self, group: Group) -> Outcome:
        view = group.view
        while True:
            if self._membership.control_requests(view).ended:
                raise GenerationEnded("the membership ended it")
            self._memory.check()
            self._saver.poll(self._state)
            self._callbacks.committed(self._saver.committed)
            if self._is_eval_due() and not self._evaluate(group):
                return self._finish(group, STOPPED)
            step = None if self._end_of_data else next_range(self._job, self._state.cursor)
            batch = None if step is None else self._slice(view, step)
            if batch is None or batch.step.num_samples == 0:
                return self._finish(group, STOPPED if self._job.stops_at(self._state.cursor) else DONE)
            try:
                control = self._step(group, batch)
            except StepRefused as refused:
                if refused.code in REWIND_CODES.values():  # to an older point, not to a new one
                    self._settle_save(group)
                    raise TrainingError(str(refused), code=refused.code) from None
                raise self._end_of(group, str(refused), refused.code) from None
            self._has_stepped = self._all_warm = True
            self._note_kernels(view)
            self._note_digest(group)
            self._allow(group)
            if control & SAVE:
                self._save(view)
            if control & STOP:
                over = self._end_of_data or next_range(self._job, self._state.cursor) is None
                return self._finish(group, DONE if over else STOPPED)
            if control & REFORM:
                raise GenerationEnded("a re-form at a step boundary was requested")

    def _writable(self) -> None:
        """Waits until no thread copies the state any more."""
        self._saver.writable()
        self._memory.writable()

    def _allow(self, group: Group) -> None:
        """Sets how long the next collectives may wait for a peer.

        It also sets how long the other members wait for this one if the generation ends meanwhile.
        """
        known = self._all_warm and self._records
        limit_s = step_limit_s(
            self._job.collective_limit_s,
            self._records[-1].step_s if known else None,
            may_compile=compiles(self._job.train, self._device.type == "cuda", self._job.invariant),
        )
        group.allow(limit_s)
        # A rank that is still computing finds gloo closed. An NCCL collective that is entered afterwards may
        # wait until its timeout.
        self._membership.step_limit(limit_s if self._device.type == "cpu" else 2 * limit_s)

    # -------------------------------------------------------------------------------- a step
    def _slice(self, view: GenerationView, step: StepRange) -> BatchSlice:
        """Returns this rank's samples of the step. The feed fetches those of the next step meanwhile."""
        micro = self._job.train.micro_batch_size
        self._faults("step_begin", self._label, view.rank)
        began = time.monotonic()
        self._membership.phase(FEED_WAIT)
        with collective("waiting for the feed"):
            batch = self._feed.get(step, view.rank, view.world_size, micro, self._state.cursor)
        self._membership.phase(STEP)
        self._waited_s = time.monotonic() - began
        ends = batch.end_of_data or batch.step.num_samples == 0
        if not ends and (coming := coming_ranges(self._job, batch.cursor)):
            self._feed.prefetch(coming, view.rank, view.world_size, micro)
        return batch

    def _step(self, group: Group, batch: BatchSlice) -> int:
        """Trains and applies the step; returns the control flags of the summary.

        Raises `StepRefused` if the step must not be applied.
        """
        view, job, label = group.view, self._job, self._label
        place = StepPlace(step=label, consumed_tokens=self._state.cursor.consumed_tokens)
        units = step_units(job.train, batch)
        terms, norm = self._reduce(view, batch, units, place)
        self._faults("gradient_done", label, view.rank)
        lr = learning_rate(job.train, job.budgets, batch.cursor.consumed_tokens)
        if units and math.isfinite(norm):  # otherwise the step is not applied, and optimizers may fail
            self._state.prepare(lr)
        key = StateKey(attempt=view.attempt, generation=view.generation, step=label)
        contribution = self._contribution(view, batch, terms, norm)
        documents = None
        if job.document_losses:
            ranks = group.gather(self._token_losses.packed(), f"the documents of step {label}")
            documents = self._token_losses.of_step(ranks)
        self._step_began = time.monotonic()
        # From here on the step may become part of the history even if this rank does not receive the summary.
        self._prepared = Prepared(key=key, cursor=batch.cursor, lr=lr, num_units=units)
        vector = group.sum(contribution.pack(view.rank, view.world_size), f"the summary of step {label}")
        summary = StepSummary.unpack(vector, self._gradient.metric_names)
        self._faults("summary_received", label, view.rank)
        prepared, self._prepared = self._prepared, None
        skipped = skip_cause(job.train, self._losses, summary, view.world_size, batch, prepared)
        apply_prepared(self._state, prepared, skipped is not None)
        self._membership.phase(BETWEEN)
        self._faults("applied", label, view.rank)
        self._end_of_data = batch.end_of_data
        mfu = self._utilisation.of_step(batch.step.num_tokens, summary.step_s, view.world_size)
        record = summary.record(
            *(prepared.key, prepared.cursor, prepared.num_units, prepared.lr),
            ended=time.time(),
            mfu=mfu,
            skipped=skipped,
            documents=documents,
        )
        self._losses = self._losses.after(record, window_of(job.train))
        self._keep(view, record, summary.acknowledged)
        self._memory.applied(self._state, sealed=summary.num_whole == view.world_size)
        self._num_busy = summary.num_busy
        return carried_out(summary.control, summary.num_busy)

    def _reduce(
        self, view: GenerationView, batch: BatchSlice, units: float, place: StepPlace
    ) -> tuple[RankTerms, float]:
        train = self._job.train
        micros = cut(batch, train.micro_batch_size, view.rank, view.world_size, self._device)
        num_micro = batches.num_micro_batches(batch.step.num_samples, train.micro_batch_size)
        sums = self._gradient.reduce(micros, num_micro, units, place)
        norm = self._gradient.clip(train.max_grad_norm)
        return sums.total(), norm  # a GPU is waited for after the norm, not before it, too

    def _contribution(
        self, view: GenerationView, batch: BatchSlice, terms: RankTerms, norm: float
    ) -> RankContribution:
        """Builds what this rank adds to the summary of the step."""
        control, acknowledged = self._control(view, self._label)
        return RankContribution(
            terms=terms,
            targets=int((batch.labels != NO_LOSS).sum()),
            samples=batch.stop - batch.start,
            digest=batch_digest(
                batch.first_index, batch.source_numbers, batch.input_ids, batch.labels, batch.document_ids
            ),
            data_wait_s=self._waited_s,
            save_blocked_s=self._saver.take_blocked_s(),
            busy=not self._saver.is_free,
            whole=self._memory.is_whole,
            control=control,
            acknowledged=acknowledged,
            grad_norm=norm,
            step_s=time.monotonic() - self._step_began,
            peak_memory_bytes=peak_memory_bytes(self._device),
        )

    def _keep(self, view: GenerationView, new: StepRecord, acknowledged: int) -> None:
        """Keeps a record until it is acknowledged. Rank 0 reports it."""
        durable = StateKey(attempt=view.attempt, generation=view.generation, step=acknowledged)
        if acknowledged >= view.step:
            self._callbacks.durable(record for record in self._records if record.key <= durable)
            self._records = [record for record in self._records if record.key > durable]
        self._records.append(new)
        if view.rank == 0:
            self._membership.report(view, (new,))

    def _callback_failed(self, text: str) -> None:
        _log.warning("%s", text)
        self._membership.callback_failed(text, self._job.train.on_callback_error == "stop")

    @property
    def _label(self) -> int:
        assert self._state.key is not None, "a member that trains holds a state"
        return self._state.key.step + 1

    def _control(self, view: GenerationView, label: int) -> tuple[int, int]:
        """Returns the control flags and the acknowledged step for the summary. Only rank 0's are used."""
        wanted = self._membership.control_requests(view)
        due = self._triggers.due(label, time.monotonic()) or self._evaluates_after(label)
        control = asked_for(wanted, due=due, is_free=self._saver.is_free, num_busy=self._num_busy)
        return control, wanted.acknowledged_step

    def _note_kernels(self, view: GenerationView) -> None:
        """Rank 0 reports after a generation's first step how the model is computed, if that was chosen."""
        if self._has_noted_kernels or view.rank != 0:
            return
        self._has_noted_kernels, compiled = True, are_compiled(self._state.model)
        if compiled or self._device.type == "cuda":
            settings = getattr(self._state.model, "config", None)
            attention = getattr(settings, "_attn_implementation", None) or ""
            eager = "liger" if self._job.train.kernels == "liger" else "eager"
            blocks, kernels = ("compiled", copies) if compiled else (eager, lambda: None)
            self._membership.computed_with(blocks, attention, kernels)

    def _note_digest(self, group: Group) -> None:
        """Rank 0 reports the digest of the weights every `digest_every_steps` steps."""
        key, every = self._state.key, self._job.digest_every_steps
        if key is None or every is None or key.step % every:
            return
        digest = group_digest(group, self._state)
        if digest is not None and group.view.rank == 0:
            self._membership.digest(group.view, key, digest)

    # -------------------------------------------------------------------------------- evaluations
    def _is_eval_due(self) -> bool:
        """Whether the current state is to be evaluated, and is not yet. The same on all ranks."""
        return self._evaluated != self._label - 1 and self._evaluates_after(self._label - 1)

    def _evaluates_after(self, step: int) -> bool:
        """Whether the state after `step`, the last one or the one that is trained, is evaluated."""
        job, cursor = self._job, self._state.cursor
        tokens = job.train.global_batch_size * job.seq_len
        consumed = cursor.consumed_tokens + (tokens if step == self._label else 0)
        return bool(self._parts) and is_due(job.eval, step, consumed, tokens)

    def _evaluate(self, group: Group) -> bool:
        """Evaluates the current state on all parts. Returns False if a stop ended that.

        Raises `GenerationEnded` if a member is lost or a re-form is requested; the next generation repeats
        it.
        """
        view, key, job = group.view, self._state.key, self._job
        assert key is not None, "a member that trains holds a state"
        group.allow(PHASE_LIMITS_S[EVAL])
        evaluator = Evaluator(
            train=job.train,
            seq_len=job.seq_len,
            gradient=self._gradient,
            device=self._device,
            rank=view.rank,
            world_size=view.world_size,
        )
        tokens, exchange = self._state.cursor.consumed_tokens, partial(self._exchange, group, key)
        records = list[EvalRecord]()
        try:
            for part in self._parts:
                self._membership.phase(EVAL)
                records.append(evaluator.evaluate(part, key, tokens, job.eval.max_samples, exchange))
                if view.rank == 0:
                    self._membership.evaluated(view, records[-1], is_last=part is self._parts[-1])
        except _StopRequested:
            return False
        if view.rank == 0 and not self._membership.send_reports():
            raise GenerationEnded("the coordinator was restarted during an evaluation")
        self._callbacks.evaluated(records)
        # No rank leaves the state before its evaluation is durable: else the loss of rank 0 could lose it.
        group.sum(torch.zeros(1, dtype=torch.int64), f"the end of the evaluation of step {key.step}")
        self._evaluated = key.step
        self._step_began = time.monotonic()
        self._membership.phase(STEP)
        self._allow(group)
        return True

    def _exchange(
        self, group: Group, key: StateKey, names: Sequence[str], contribution: RankContribution
    ) -> StepSummary:
        """Sums a batch of an evaluation over all ranks, and carries out what the coordinator requests."""
        view = group.view
        self._faults("evaluating", key.step, view.rank)
        if self._membership.control_requests(view).ended:
            raise GenerationEnded("the membership ended it")
        wanted = self._membership.control_requests(view)
        control = asked_for(wanted, due=False, is_free=self._saver.is_free, num_busy=self._num_busy)
        contribution = replace(contribution, busy=not self._saver.is_free, control=control)
        vector = group.sum(
            contribution.pack(view.rank, view.world_size), f"an evaluation of step {key.step}"
        )
        summary = StepSummary.unpack(vector, names)
        self._membership.phase(EVAL)
        self._saver.poll(self._state)
        self._num_busy = summary.num_busy
        control = carried_out(summary.control, summary.num_busy)
        is_loaded = view.source_rank is None and key.step == view.step
        if control & SAVE and key != self._saver.begun and not is_loaded:
            self._save(view)
        if control & STOP:
            raise _StopRequested
        if control & REFORM:
            raise GenerationEnded("a re-form during an evaluation was requested")
        return summary

    # -------------------------------------------------------------------------------- saves
    def _save(self, view: GenerationView) -> None:
        """Starts a save of the current state. Training does not depend on its outcome."""
        key = self._state.key
        assert key is not None, "a blank member has nothing to save"
        self._callbacks.committed(self._saver.committed)  # before there is a newer one
        self._triggers = self._triggers.begun(key.step, time.monotonic())
        peak = peak_memory_bytes(self._device)
        self._saver.begin(self._state, view, self._records, peak)

    def _finish(self, group: Group, reason: str) -> Outcome:
        """Saves the last state and leaves; see `_save_last`."""
        key = self._save_last(group)
        if reason == DONE and self._job.eval.at_end and self._parts and self._evaluated != key.step:
            self._evaluate(group)  # a stop ends it, and the run is done all the same
        self._membership.phase(SAVE_WAIT)  # for callbacks; the others have what they need
        self._callbacks.durable(self._records)  # a point is committed only behind all of its records
        self._callbacks.committed(self._saver.committed)
        self._callbacks.end(reason)
        self._membership.finished(key, reason)
        return Outcome(reason=reason, key=key, cursor=self._state.cursor)

    def _end_of(self, group: Group, problem: str, code: str) -> TrainingError:
        """Saves the state before the refused step and returns the error that ends the run.

        All ranks know the problem from the same summary. Raises what `_save_last` raises, except
        `UnsavedError`.
        """
        key = self._state.key
        assert key is not None, "a member that trains holds a state"
        if key.step == 0:
            return TrainingError(f"{problem}. No step was trained before it", code=code)
        try:
            key = self._save_last(group)
        except UnsavedError as unsaved:
            return TrainingError(f"{problem}. The state before it is not saved: {unsaved}", code=code)
        if key != self._saver.committed:  # a point holds it under the name of an older generation
            text = f"{problem}. The state before it is saved in the resume point of step {key.step}"
            return TrainingError(text, code=code)
        text = f"{problem}. The state before it is saved as resume point {key.point_name}"
        return TrainingError(text, code=code)

    def _settle_save(self, group: Group) -> None:
        """Waits until the current save is a point or given up."""
        await_saves(group, self._membership, self._saver, self._state, lambda: self._saver.is_free)

    def _save_last(self, group: Group) -> StateKey:
        """Saves the last state and returns its key once it is committed.

        It waits for the current save first, and saves the state unless a point holds it. Raises
        `LastSaveFailed` if the save was given up; the members then meet again and save under a new name.
        Raises `UnsavedError` if this has continued for too long.
        """
        state, saver = self._state, self._saver
        assert state.key is not None, "a member that trains holds a state"
        last = (None, state.key)
        await_saves(group, self._membership, saver, state, lambda: saver.saving in last)
        if not state.committed and state.key != saver.begun:
            self._save(group.view)
        if not await_saves(group, self._membership, saver, state, lambda: saver.is_free):
            name = state.key.point_name
            left_s = self._unsaved.again(name)
            raise LastSaveFailed(f"the save of {name} was given up; it is tried for {left_s:.0f} s more")
        state.committed = True
        return state.key


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the most bytes that this process has used at one time, in one call.

    On a CUDA `device` it counts the tensors of this process, else the machine memory of the whole process
    (its maximum resident set).
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux reports it in KiB
