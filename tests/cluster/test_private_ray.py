"""Canaries for the private parts of Ray: a new Ray that changes one fails here with what a run would lose.
And the plain way that is gone without each.
"""

from __future__ import annotations

import dataclasses
import logging
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.node import Node

from orchestrator.cluster import connection, data_share, job_server, node_groups, private_ray, ray_inventory
from orchestrator.cluster.connection import _HELPERS, ClusterConnection, _RayHeard, _without_helpers
from orchestrator.cluster.node_groups import remove_orphaned_placement_groups
from orchestrator.cluster.private_ray import PrivatePart
from orchestrator.cluster.ray_state import ray_says
from orchestrator.config.loading import load_config
from orchestrator.errors import ResourceError
from orchestrator.records.run_status import MemberInfo
from tests.raising import raises

ROOT = Path(__file__).resolve().parents[2]
Delete = Callable[[PrivatePart], str]
PARTS = {
    **{name: part for name, part in vars(ray_inventory).items() if isinstance(part, PrivatePart)},
    **{next(iter(part.texts)): part for part in ray_inventory.VARIABLES},
}
NAMED = [name for name, part in PARTS.items() if part.names]
_EXECUTOR, _STATS, _POOL, _CACHED = (
    f"ray.data._internal.{path}"
    for path in (
        "execution.streaming_executor.create_cluster_autoscaler",
        "stats.get_or_create_stats_actor",
        "execution.operators.actor_pool_map_operator.get_or_create_actor_location_tracker",
        "utils.cached_ray_internals.get_or_create_actor_location_tracker",
    )
)


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has told nothing yet."""
    monkeypatch.setattr(private_ray, "_told", set())


@pytest.fixture
def delete(monkeypatch: pytest.MonkeyPatch) -> Delete:
    """Takes the first name of a part away from Ray; returns it."""

    def first(part: PrivatePart) -> str:
        name = next(iter(part.names))
        # the method of a global object is its class's
        monkeypatch.delattr(name.replace(":state.", ":GlobalState.").replace(":", "."))
        return name

    return first


@pytest.fixture
def rays_own(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """What a name of Ray's stands for now; whatever a test puts there, Ray gets it back afterwards."""

    def keep(path: str) -> Any:
        owner, _, last = path.rpartition(".")
        value = private_ray._named(f"{owner}:{last}")
        monkeypatch.setattr(path, value)
        return value

    return keep


@pytest.fixture
def another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "__version__", "2.99.0")


# ------------------------------------------------------------ canaries
@pytest.mark.parametrize("name", PARTS)
def test_this_ray_has_the_private_part(name: str) -> None:
    sentence = PARTS[name].sentence()
    assert not sentence, sentence


def test_every_part_is_looked_at_before_a_launch_on_another_ray() -> None:
    looked_at = {*ray_inventory.OF_CORE, *ray_inventory.OF_LIBRARIES}
    assert looked_at == set(PARTS.values())


def test_every_variable_that_is_set_for_ray_is_looked_at() -> None:
    of_jobs = (job_server.STOP_WAIT, *job_server.COPY_ENVIRONMENT)
    places = (connection._HEALTH, node_groups._TRAIN_ENVIRONMENT, data_share._ENVIRONMENT, of_jobs)
    assert {name for place in places for name in place} == {
        name for part in ray_inventory.VARIABLES for name in part.texts
    }


def test_the_tested_ray_is_the_one_that_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"ray[train,data]=={private_ray.TESTED}.*" in project["dependencies"]


# ------------------------------------------------------------ what is missing is said
@pytest.mark.parametrize("name", NAMED)
def test_a_part_that_is_gone_is_named_once_with_what_it_costs(
    name: str, delete: Delete, caplog: pytest.LogCaptureFixture
) -> None:
    part = PARTS[name]
    gone = delete(part)
    assert part.found() is None
    assert part.found() is None
    (said,) = caplog.messages
    assert said == f"this Ray ({ray.__version__}) lacks {gone}, which Ray 2.60 has: {part.lost}"


def test_a_part_that_ray_does_not_use_any_more_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Node, "start_head_processes", lambda self: self.start_gcs_server())
    assert ray_inventory.MONITOR.gone() == (
        "a use of ray._private.node:Node.start_monitor in ray._private.node:Node.start_head_processes"
    )
    assert ray_inventory.MONITOR.found() is None


def test_a_part_of_another_shape_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ray.train.v2._internal.execution.controller.TrainController.run", lambda self: "not a coroutine"
    )
    assert "the former shape of" in ray_inventory.CONTROLLER.gone()


@pytest.mark.parametrize("file", ["_private/nothing.py", "_private/state.py"])
def test_a_variable_that_ray_does_not_read_any_more_is_gone(file: str) -> None:
    part = dataclasses.replace(ray_inventory.COPIES, texts={"RAY_NO_SUCH_VARIABLE": file})
    assert part.gone() == f"RAY_NO_SUCH_VARIABLE in {file}"


def test_a_launch_says_at_its_start_what_ray_itself_lacks(
    delete: Delete, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)  # nothing is started
    delete(ray_inventory.ACTOR_TABLE)
    heard: list[str] = []
    for _ in range(2):
        ClusterConnection(load_config(ROOT / "configs/quickstart.yaml"), 1, 0, heard.append).close()
    assert heard == [ray_inventory.ACTOR_TABLE.sentence()]


@pytest.mark.usefixtures("another_version")
def test_on_another_ray_what_its_libraries_lack_is_said_before_anything_is_started(delete: Delete) -> None:
    delete(ray_inventory.STATISTICS)
    heard: list[str] = []
    ray_inventory.check(heard.append)
    assert heard == [ray_inventory.STATISTICS.sentence()]
    assert heard[0].startswith("this Ray (2.99.0) lacks ray.data._internal.stats:get_or_create_stats_actor, ")


@pytest.mark.usefixtures("another_version")
def test_a_ray_that_no_run_can_use_is_refused_with_the_one_to_install(
    delete: Delete, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete(ray_inventory.NODE_GROUPS)
    values = "this Ray (2.99.0) lacks ray.train.backend:Backend", '"ray[train,data]==2.60.*"'
    with raises(ResourceError, "cluster.ray_version", *values):
        ClusterConnection(load_config(ROOT / "configs/quickstart.yaml"), 1, 0)
    assert not ray.is_initialized()
    with raises(ResourceError, "cluster.ray_version", *values):
        node_groups.run_group("name", 1, {}, "node", "storage", lambda _: None, {})


# ------------------------------------------------------------ the plain way
def test_without_the_function_that_prints_errors_rays_loggers_are_heard_as_before(delete: Delete) -> None:
    delete(ray_inventory.PRINTING)
    heard, handlers = list[str](), logging.getLogger("ray").handlers
    listening = _RayHeard(heard.append)
    logging.getLogger("ray").error("an error of %s", "Ray's")
    listening.end()
    assert heard == ["an error of Ray's"]
    assert logging.getLogger("ray").handlers is handlers
    assert not hasattr(ray._private.worker, "print_to_stdstream")


@pytest.mark.parametrize("helper", _HELPERS)
def test_a_helper_that_cannot_be_left_out_is_rays_and_the_others_are_left_out(
    helper: PrivatePart, delete: Delete
) -> None:
    missing = delete(helper).rpartition(".")[2]
    others = [name.rpartition(".")[2] for part in _HELPERS if part is not helper for name in part.names]
    own = [getattr(Node, name) for name in others]
    with _without_helpers():
        assert not hasattr(Node, missing)
        assert all(getattr(Node, name) not in own for name in others)
    assert [getattr(Node, name) for name in others] == own
    assert not hasattr(Node, missing)


def test_without_rays_table_of_actors_nobody_is_known_to_be_dead(delete: Delete) -> None:
    delete(ray_inventory.ACTOR_TABLE)
    assert ray_says(MemberInfo(member="m", actor_id="a", node_id="n", pid=1)) is None


def test_without_rays_table_of_placement_groups_none_is_removed(delete: Delete) -> None:
    delete(ray_inventory.PLACEMENT_GROUPS)
    assert remove_orphaned_placement_groups() == 0


@pytest.mark.parametrize("missing", ["OWN_SHARE", "STATISTICS", "PLACES"])
def test_what_ray_data_does_not_let_replace_goes_its_own_way(
    missing: str, delete: Delete, rays_own: Callable[[str], Any]
) -> None:
    paths = {"OWN_SHARE": [_EXECUTOR], "STATISTICS": [_STATS], "PLACES": [_POOL, _CACHED]}
    own = {path: rays_own(path) for group in paths.values() for path in group}
    gone = delete(getattr(ray_inventory, missing)).replace(":", ".")
    data_share.take_own_share(2.0)
    for path, value in own.items():
        owner, _, last = path.rpartition(".")
        now = getattr(private_ray._owner(f"{owner}:{last}")[0], last, None)
        if path == gone:
            assert now is None
        else:
            assert (now is value) == (path in paths[missing]), path


def test_our_share_of_the_cluster_is_what_ray_data_is_given(rays_own: Callable[[str], Any]) -> None:
    for path in (_EXECUTOR, _STATS, _POOL, _CACHED):
        rays_own(path)
    data_share.take_own_share(2.0)
    from ray.data._internal.execution import streaming_executor

    share = streaming_executor.create_cluster_autoscaler(None, None, None, execution_id="any")
    assert share.get_total_resources().cpu == 2.0
    assert share.try_trigger_scaling() is share.on_executor_shutdown() is None


def test_ray_data_looks_often_only_while_a_chunk_is_waited_for(delete: Delete) -> None:
    from ray.data._internal.execution import streaming_executor_state as state

    own = state.WAIT_FOR_TASK_COMPLETION_TIMEOUT_S
    with data_share.looking_often():
        assert own > state.WAIT_FOR_TASK_COMPLETION_TIMEOUT_S
    assert own == state.WAIT_FOR_TASK_COMPLETION_TIMEOUT_S
    first, second = data_share.looking_often(), data_share.looking_often()
    for step in (first.__enter__, second.__enter__):
        step()
    for end in (first.__exit__, second.__exit__):  # those of two pipelines overlap
        end(None, None, None)
    assert own == state.WAIT_FOR_TASK_COMPLETION_TIMEOUT_S
    delete(ray_inventory.LOOKS)
    with data_share.looking_often():
        assert not hasattr(state, "WAIT_FOR_TASK_COMPLETION_TIMEOUT_S")


TRAINER = "ray.train.v2.api.data_parallel_trainer"
METHODS = {
    "CALLBACKS": "_create_default_callbacks",
    "CONTROLLER": "_initialize_and_run_controller",
}
REPLACED = {
    "SCALING": f"{TRAINER}.create_scaling_policy",
    "BARRIER": "ray.train.v2._internal.execution.worker_group.worker_group.SynchronizationActor",
}


def rename(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """As if Ray had another name for it: Ray Train itself needs what it is made of."""
    names = {f"{name}_renamed": user for name, user in getattr(ray_inventory, part).names.items()}
    monkeypatch.setattr(node_groups, part, dataclasses.replace(getattr(ray_inventory, part), names=names))


@pytest.mark.parametrize("missing", ["", *METHODS, *REPLACED])
def test_what_ray_train_does_not_let_replace_goes_its_own_way(
    missing: str, rays_own: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    rays_own("ray.train.v2._internal.execution.worker_group.state._shutdown_sync_actor")
    own = {name: rays_own(path) for name, path in REPLACED.items()}
    methods = {name: getattr(DataParallelTrainer, method) for name, method in METHODS.items()}
    if missing:
        rename(monkeypatch, missing)
    lean = node_groups.lean_trainer()
    for name, method in METHODS.items():
        assert (getattr(lean, method) is methods[name]) == (name == missing), name
    for name, path in REPLACED.items():
        module, _, last = path.rpartition(".")
        assert (private_ray._named(f"{module}:{last}") is own[name]) == (name == missing), name


def test_without_rays_trainer_for_any_framework_its_trainer_for_torch_takes_our_back_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray.train.torch import TorchTrainer

    begun: list[Any] = []

    def fit(trainer: Any) -> None:
        begun.append(trainer)

    monkeypatch.setattr(TorchTrainer, "fit", fit)  # Ray's, which would start it
    rename(monkeypatch, "TRAINER")
    node_groups.run_group("name", 2, {"CPU": 1.0}, "a-node", "/storage", lambda _: None, {"key": "value"})
    (trainer,) = begun
    assert isinstance(trainer, TorchTrainer)
    assert trainer.backend_config.backend_cls.has_replica_groups
    assert trainer.train_loop_config == {"key": "value"}
    assert (trainer.scaling_config.num_workers, trainer.scaling_config.label_selector) == (
        2,
        {"ray.io/node-id": "a-node"},
    )
