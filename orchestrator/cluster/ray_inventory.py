"""The private parts of Ray that `cluster/` uses, and what a run loses without each of them.

It is only a list: the user of a missing part takes the plain way. It loads no Ray before `check`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from orchestrator.cluster.private_ray import TESTED, PrivatePart

JOB_COPIES = "working_dir_files"  # Ray unpacks a job's working directory in a folder of this one's
DATASET_THREADS = "StreamingExecutor"  # name of Ray Data's threads

_HELPER_COSTS = "with 1 to 2 CPU seconds at the start and up to 200 MB"

# ------------------------------------------------------------ Ray itself, in the driver and the coordinator
_STATE = "ray._private.state:"
_NODE = "ray._private.node:Node."

PRINTING = PrivatePart(
    names={"ray._private.worker:print_to_stdstream": "ray._private.worker:listen_error_messages"},
    lost="what it says of its cluster's errors stands on stdout, at length, and not in the run's log file",
)
LOG_MONITOR, MONITOR, API_SERVER = (
    PrivatePart(
        names={f"{_NODE}{name}": f"{_NODE}{user}"},
        lost=f"a local Ray also starts {what}, which nothing here uses (three of its kind together take 2 "
        "CPU seconds at the start)",
    )
    for name, user, what in (
        ("start_log_monitor", "start_ray_processes", "its log monitor"),
        ("start_monitor", "start_head_processes", "its autoscaler"),
        ("start_api_server", "start_head_processes", "its dashboard's server"),
    )
)
SHUTTING_DOWN = PrivatePart(
    names={
        "ray._private.worker:_global_node": "ray._private.worker:shutdown",
        "ray._private.worker:shutdown": "",
        f"{_NODE}kill_all_processes": "ray._private.worker:shutdown",
    },
    shape=lambda _, __, kill: {"check_alive", "allow_graceful"} <= inspect.signature(kill).parameters.keys(),
    lost="where the cluster's GCS stands still when a launch ends, processes of a local Ray may stay, and a "
    "Python program that trained waits for it when it exits",
)
SIGTERM_HANDLER = PrivatePart(
    names={"ray._private.utils:set_sigterm_handler": "ray._private.worker:init"},
    lost="a SIGTERM that comes while a launch connects to Ray ends it without saying so",
)
FREE_RESOURCES = PrivatePart(
    names={f"{_STATE}available_resources_per_node": ""},
    lost="of several nodes it is not known which one's CPUs and GPUs are taken: on a busy cluster a job that "
    "does not fit is not refused at once, its workers wait for room",
)
DRAINING_NODES = PrivatePart(
    names={f"{_STATE}state.get_draining_nodes": ""},
    lost="nobody hears that a node is about to be taken away: its workers are lost with it, and under shard "
    "the steps since the newest memory point or resume point, too",
)
HEAD_NODE = PrivatePart(
    names={"ray._common.constants:HEAD_NODE_RESOURCE_NAME": ""},
    shape=lambda name: isinstance(name, str),
    lost="the head is not known among the nodes, so that of equally roomy ones another may be chosen",
)
_GROUP_TABLE = "ray.core.generated.gcs_pb2:PlacementGroupTableData"
PLACEMENT_GROUPS = PrivatePart(
    names={
        f"{_STATE}state._connect_and_get_accessor": "",
        _GROUP_TABLE: "",
        "ray._raylet:GlobalStateAccessor.get_placement_group_table": "",
        f"{_GROUP_TABLE}.CREATOR_JOB_ID_FIELD_NUMBER": "",
        f"{_GROUP_TABLE}.CREATOR_ACTOR_DEAD_FIELD_NUMBER": "",
        f"{_GROUP_TABLE}.PLACEMENT_GROUP_ID_FIELD_NUMBER": "",
        f"{_GROUP_TABLE}.STATE_FIELD_NUMBER": "",
        f"{_GROUP_TABLE}.REMOVED": "",
    },
    lost="a node whose workers were stopped keeps their CPUs and GPUs taken until the launch ends, so that "
    "it gets no workers again",
)
ACTOR_TABLE = PrivatePart(
    names={f"{_STATE}state.actor_table": ""},
    texts={'"State":': "_private/state.py", '"DeathCause":': "_private/state.py"},
    lost="a worker that died is left out after 10 s instead of at once, and why it died is not said",
)
ACTOR_IDS = PrivatePart(
    names={"ray.actor:ActorHandle._actor_id": ""},
    texts={'"Pid":': "_private/state.py"},
    lost="when the coordinator or the feeder dies, it is said that a process did, and not which one",
)
DEATH_CAUSES = PrivatePart(
    texts={
        "Worker exit type: ": "core/src/ray/raylet/raylet",
        " Worker PID: ": "core/src/ray/raylet/raylet",
        " Node ID: ": "core/src/ray/raylet/raylet",
        "oom_context": "core/generated/common_pb2.py",
        "NODE_DIED": "core/generated/common_pb2.py",
        "OWNER_DIED": "core/generated/common_pb2.py",
        "RAY_KILL": "core/generated/common_pb2.py",
    },
    lost="why a worker died may be said wrongly: as a death without an error",
)
OF_CORE = (
    PRINTING,
    LOG_MONITOR,
    MONITOR,
    API_SERVER,
    SHUTTING_DOWN,
    SIGTERM_HANDLER,
    FREE_RESOURCES,
    DRAINING_NODES,
    HEAD_NODE,
    PLACEMENT_GROUPS,
    ACTOR_TABLE,
    ACTOR_IDS,
)

# ------------------------------------------------------------ Ray Train, in a node's agent
_TRAINER = "ray.train.v2.api.data_parallel_trainer:"
_GROUP = "ray.train.v2._internal.execution.worker_group.worker_group:"
_GROUP_STATE = "ray.train.v2._internal.execution.worker_group.state:"
_FIT = f"{_TRAINER}DataParallelTrainer.fit"
_CONTROLLER = "ray.train.v2._internal.execution.controller:TrainController"
_POLICY = "ray.train.v2._internal.execution.scaling_policy:FixedScalingPolicy"

NODE_GROUPS = PrivatePart(
    names={
        "ray.train.backend:Backend": "",
        "ray.train.backend:BackendConfig": "",
        "ray.train:ScalingConfig.label_selector": "",
    },
    lost="no group of workers can be started on a node of its own, so no run can begin",
)
REPLACED_ALONE = PrivatePart(
    names={"ray.train.backend:Backend.has_replica_groups": f"{_GROUP}WorkerGroup.__init__"},
    lost="when a worker dies, all workers of its node are started anew, and if there are no others the run "
    "goes back to its newest resume point",
)
REPLACED_TOGETHER = PrivatePart(
    names={f"{_GROUP}WorkerGroup._replace_replica_group_impl": f"{_GROUP}WorkerGroup.replace_replica_group"},
    shape=lambda one: (
        list(inspect.signature(one).parameters) == ["self", "replica_group_index"]
        and {"_replica_groups", "is_active", "clear_result_queue"} <= set(one.__code__.co_names)
    ),
    lost="when two of three or more workers of a node die at one moment, all workers of that node are "
    "started anew",
)
TRAINER = PrivatePart(
    names={f"{_TRAINER}DataParallelTrainer": ""},
    lost="Ray's trainer for torch takes its place, which loads torch once more on each node, with about 2.5 "
    "CPU seconds and 200 MB",
)
CONTROLLER = PrivatePart(
    names={
        _CONTROLLER: "",
        f"{_CONTROLLER}.run": "",
        f"{_CONTROLLER}.get_result": "",
        f"{_TRAINER}DataParallelTrainer._initialize_and_run_controller": _FIT,
    },
    shape=lambda _, run, result, start: (
        inspect.iscoroutinefunction(run)
        and not inspect.iscoroutinefunction(result)
        and list(inspect.signature(start).parameters) == ["self", "controller_init_kwargs"]
    ),
    lost=f"each node's Ray Train controller is a process of its own, {_HELPER_COSTS}",
)
CALLBACKS = PrivatePart(
    names={
        f"{_TRAINER}DataParallelTrainer._create_default_callbacks": _FIT,
        f"{_TRAINER}PlacementGroupCleanerCallback": "",
        f"{_TRAINER}DatasetsCallback": "",
    },
    lost=f"each node has two more helper processes (datasets, placement groups), each {_HELPER_COSTS}",
)
SCALING = PrivatePart(
    names={
        f"{_TRAINER}create_scaling_policy": _FIT,
        _POLICY: "",
        f"{_POLICY}.after_controller_start": "",
        f"{_POLICY}._maybe_send_resource_request": f"{_POLICY}.make_decision_for_non_running_worker_group",
    },
    lost=f"the cluster has one more helper process (for autoscaling), {_HELPER_COSTS}",
)
BARRIER = PrivatePart(
    names={
        f"{_GROUP}SynchronizationActor": f"{_GROUP}WorkerGroup._start_impl",
        f"{_GROUP_STATE}_shutdown_sync_actor": f"{_GROUP_STATE}WorkerGroupState.shutdown",
    },
    lost=f"each node has one more helper process (a barrier where nobody meets), {_HELPER_COSTS}",
)

# ------------------------------------------------------------ Ray Data, in the feeder
_EXECUTOR = "ray.data._internal.execution.streaming_executor:"
_EXECUTOR_STATE = "ray.data._internal.execution.streaming_executor_state:"
_STATS = "ray.data._internal.stats:"
_POOL = "ray.data._internal.execution.operators.actor_pool_map_operator:"
_CACHED = "ray.data._internal.utils.cached_ray_internals:"

OWN_SHARE = PrivatePart(
    names={
        f"{_EXECUTOR}create_cluster_autoscaler": f"{_EXECUTOR}StreamingExecutor.execute",
        "ray.data._internal.cluster_autoscaler:ClusterAutoscaler": "",
        "ray.data:ExecutionResources": "",
    },
    shape=lambda _, base, __: (
        base.__abstractmethods__ <= {"try_trigger_scaling", "on_executor_shutdown", "get_total_resources"}
    ),
    lost="Ray Data deals out the CPUs by itself, through one more helper process, and after a kill "
    "tokenizers may wait for theirs for up to three minutes",
)
STATISTICS = PrivatePart(
    names={f"{_STATS}get_or_create_stats_actor": f"{_STATS}_StatsManager.register_dataset_to_stats_actor"},
    lost=f"Ray Data starts one more helper process (for its dashboard), {_HELPER_COSTS}",
)
PLACES = PrivatePart(
    names={
        f"{_POOL}get_or_create_actor_location_tracker": f"{_POOL}ActorPoolMapOperator._start_actor",
        f"{_CACHED}get_or_create_actor_location_tracker": f"{_CACHED}get_actor_locations",
    },
    lost=f"Ray Data starts one more helper process (for actors' places), {_HELPER_COSTS}",
)
LOOKS = PrivatePart(
    names={
        f"{_EXECUTOR_STATE}WAIT_FOR_TASK_COMPLETION_TIMEOUT_S": f"{_EXECUTOR_STATE}process_completed_tasks"
    },
    shape=lambda seconds: isinstance(seconds, float),
    lost="two tokenizers stand still between windows, for up to 0.1 s: a third of their speed",
)


# ------------------------------------------------------------ names that Ray reads or gives
def _variable(name: str, file: str, lost: str) -> PrivatePart:
    return PrivatePart(texts={name: file}, lost=lost)


_CONSTANTS = "train/v2/_internal/constants.py"
VARIABLES = (
    *(
        _variable(
            name,
            "core/src/ray/gcs/gcs_server",
            "in a local Ray a dead node is noticed later: by Ray's own settings after 13.6 s, by ours after "
            "2 to 3 s",
        )
        for name in (
            "RAY_health_check_period_ms",
            "RAY_health_check_timeout_ms",
            "RAY_health_check_failure_threshold",
        )
    ),
    _variable(
        "RAY_worker_niceness",
        "core/src/ray/raylet/raylet",
        "in a local Ray training does not come before other processes (measured with tokenizers beside it: "
        "steps of 1.2 s instead of 0.75 s)",
    ),
    _variable(
        "RAY_TRAIN_V2_ENABLED",
        _CONSTANTS,
        "where Ray Train's version 1 is chosen, no group of workers can be started on a node of its own, so "
        "no run can begin",
    ),
    _variable(
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S",
        _CONSTANTS,
        "a dead worker's replacement is started up to 2 s later",
    ),
    _variable(
        "RAY_TRAIN_METRICS_ENABLED", _CONSTANTS, "Ray Train keeps its own metrics, which costs some CPU time"
    ),
    _variable(
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER",
        _CONSTANTS,
        "each node may have one more helper process (for preemptions)",
    ),
    _variable(
        "RAY_CHDIR_TO_TRIAL_DIR", "train/constants.py", "workers run in a folder of Ray's, not the job's"
    ),
    _variable(
        "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC", "_common/constants.py", "Ray's log files have lines without use"
    ),
    _variable(
        "RAY_DATA_METADATA_PREFETCH_ON_THREAD",
        "data/_internal/execution/metadata_fetcher.py",
        "a chunk of tokens arrives 0.1 s later",
    ),
    _variable(
        "RAY_JOB_STOP_WAIT_TIME_S",
        "dashboard/modules/job/job_supervisor.py",
        "a job that is stopped has 3 s to save: stop it by `orchestrator stop`, which waits",
    ),
    _variable(
        "RAY_RUNTIME_ENV_IGNORE_GITIGNORE",
        "_private/ray_constants.py",
        "a submitted job gets no file that .gitignore names: give its data by absolute paths",
    ),
    _variable(
        "RAY_DATA_USAGE_DISABLED",
        "data/_internal/usage/collector.py",
        "a helper process for usage statistics starts beside the feeder",
    ),
)
COPIES = PrivatePart(
    texts={JOB_COPIES: "_private/runtime_env/working_dir.py"},
    lost="a run.storage inside a Ray job's copy of its working directory is not refused, and Ray deletes it: "
    "give jobs an absolute path",
)
THREADS = PrivatePart(
    texts={f'"{DATASET_THREADS}-': "data/_internal/execution/streaming_executor.py"},
    lost="the feeder's statistics do not count Ray Data's threads",
)
OF_LIBRARIES = (
    *(NODE_GROUPS, REPLACED_ALONE, REPLACED_TOGETHER, TRAINER, CONTROLLER, CALLBACKS, SCALING, BARRIER),
    *(OWN_SHARE, STATISTICS, PLACES, LOOKS, *VARIABLES, DEATH_CAUSES, COPIES, THREADS),
)


def check(say: Callable[[str], None]) -> None:
    """Reports what this Ray lacks, a sentence for each part, before anything is started. Raises
    `ResourceError` if a part that every run needs is missing.

    The parts of Ray Train and Ray Data are loaded only by processes of their own. They are checked only if
    this is not the tested Ray, because that takes seconds.
    """
    import ray

    parts: tuple[PrivatePart, ...] = OF_CORE
    if ray.__version__.split(".")[:2] != TESTED.split("."):
        NODE_GROUPS.require()
        parts = (*OF_CORE, *OF_LIBRARIES)
    for part in parts:
        part.tell(say)
