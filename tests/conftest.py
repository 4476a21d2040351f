"""Fixtures shared by every test: a small real corpus with a tokenizer, and the mapping of a very small job.

They import neither ray nor torch before a test asks for a cluster, so that the pure tests stay fast.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import shutil
import signal
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from orchestrator.data.sample_corpus import train_tokenizer
from orchestrator.paused_gc import paused_gc
from orchestrator.storage.files import Storage
from tests import warm_python

if TYPE_CHECKING:
    from tests.launch.runner import Runner

# `make test` tries the same examples each time, `make chaos` new ones (`--hypothesis-profile=random`). No
# example has a deadline: a busy machine is no failure.
settings.register_profile("random", deadline=None, database=None, print_blob=True)
settings.register_profile("orchestrator", max_examples=50, deadline=None, database=None, derandomize=True)
settings.load_profile("orchestrator")

# a dead raylet is noticed after 2 to 3 s; read by Ray when a node is started
for _name, _value in {"period_ms": "1000", "timeout_ms": "2000", "failure_threshold": "3"}.items():
    os.environ.setdefault(f"RAY_health_check_{_name}", _value)

# Read by OpenMP when torch is imported. Threads that wait for each other otherwise spin, and where three
# processes share two cores they spin for most of the time: a small model takes ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# what one test finds out of a tokenizer is no other's
os.environ["ORCHESTRATOR_CACHE_DIR"] = ""
TOKENIZER_VOCAB = 1000
EXAMPLE = Path(__file__).with_name("examples") / "format2"  # a folder with a run that is stored in git
CORPUS_FILES = 3
CORPUS_BYTES = 1_500_000
WARM = "ORCHESTRATOR_TESTS_WARM_PYTHON"
RAY = "ray"  # the group of tests that use the session's Ray cluster

TinyConfig = Callable[..., dict[str, Any]]


# A shell without job control starts `make test &` with SIGINT ignored: nothing here could be interrupted.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Several processes of tests share one server of Python processes."""
    if config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        shared = ExitStack()
        config.add_cleanup(shared.close)
        folder = Path(shared.enter_context(TemporaryDirectory(prefix="warm-")))
        os.environ[WARM] = shared.enter_context(warm_python.launcher(folder))


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """The tests' imports."""
    with paused_gc():
        return (yield)


@pytest.hookimpl(tryfirst=True)  # before pytest reads `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tests of a group go to one process (`--dist loadgroup`), in several processes the slow ones first.

    The groups: `ray` uses the session's Ray cluster, `forked` starts processes by tests/forked.py, whose
    server they need once, and every other file is one.
    """
    _leave_to_chaos(items, whole_files="::" not in "".join(config.args))
    for item in items:
        if item.get_closest_marker("system") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))
        if "head" in getattr(item, "fixturenames", ()):
            assert _group(item) == RAY, f"{item.nodeid} uses the Ray cluster: mark it xdist_group({RAY!r})"
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(_file(item.nodeid)))
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda i: (_group(i) != RAY, i.get_closest_marker("system") is None))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fails if xdist has not taken the groups over: the tests would spread, each process with its own Ray."""
    if getattr(session.config.option, "loadgroup", False):
        spread = [item.nodeid for item in session.items if not item.nodeid.endswith(f"@{_group(item)}")]
        assert not spread, f"xdist does not group these (another version of pytest?): {spread[:3]}"


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str) -> None:
    """A process of the tests has died, so they end: xdist would wait for ever for the rest of its group."""
    pytest.exit(f"a process of the tests died while it ran {crashitem}", returncode=1)


def _group(item: pytest.Item) -> str:
    mark = item.get_closest_marker("xdist_group")
    return str(mark.args[0]) if mark is not None else _file(item.nodeid)


def _leave_to_chaos(items: list[pytest.Item], *, whole_files: bool) -> None:
    """Marks the cases of a test as `chaos`, except those whose ids its mark `quick("a", "b")` names."""
    missing = set()
    for item in items:
        if (mark := item.get_closest_marker("quick")) is None:
            continue
        test, _, case = item.nodeid.removesuffix("]").partition("[")
        missing |= {(test, each) for each in mark.args}
        if case not in mark.args:
            item.add_marker(pytest.mark.chaos)
    there = {tuple(item.nodeid.removesuffix("]").split("[", 1)) for item in items}
    assert not whole_files or missing <= there, f"there are no such cases: {sorted(missing - there)}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What uses `new_storage` runs on a folder and on a bucket; who takes `tmp_path` itself changes files of
    the folder by hand.
    """
    if "storage_kind" in metafunc.fixturenames:
        by_hand = "tmp_path" in inspect.signature(metafunc.function).parameters
        metafunc.parametrize("storage_kind", ("local",) if by_hand else ("local", "s3"), scope="function")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """After a test none of its launches runs, and Python's path and the working directory are as before."""
    before = (sys.executable, os.getcwd())
    yield
    if launches := sys.modules.get("tests.trainer.launch"):
        launches.end_all()
    assert (sys.executable, os.getcwd()) == before, "the test has changed them for all tests after it"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The URL of a server of S3, one for all tests of a process."""
    from tests.storage.servers import moto

    with moto() as url:
        yield url


@pytest.fixture
def new_storage(
    storage_kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Storage]:
    """The storage of a run of this name: the same one for each call with it."""
    if storage_kind == "local":
        return lambda name: Storage(str(tmp_path / name))
    from orchestrator.storage.open import open_storage
    from tests.storage.servers import new_bucket, reach

    url = request.getfixturevalue("s3_server")
    reach(monkeypatch, url, tmp_path)
    bucket = new_bucket(url)
    return lambda name: open_storage(f"{bucket}/{name}")


def _stdlib_documents() -> Iterator[tuple[str, str]]:
    """(path, text) of the standard library's top-level modules by name, about 1.5 MB altogether."""
    folder = Path(sysconfig.get_path("stdlib"))
    taken = 0
    for path in sorted(folder.glob("*.py"), key=lambda p: p.name):
        text = path.read_text(encoding="utf-8")
        if not text or len(text) > 100_000:
            continue
        yield path.name, text
        taken += len(text.encode())
        if taken >= CORPUS_BYTES:
            return


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `part-0.jsonl` to `part-2.jsonl` (`text`, `path`) and `tokenizer/`, only to be read."""
    folder = tmp_path_factory.mktemp("corpus")
    documents = list(_stdlib_documents())
    for part in range(CORPUS_FILES):
        lines = [json.dumps({"text": text, "path": path}) for path, text in documents[part::CORPUS_FILES]]
        (folder / f"part-{part}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    train_tokenizer((text for _, text in documents[::8]), TOKENIZER_VOCAB, folder / "tokenizer")
    return folder


@pytest.fixture(scope="session")
def tiny_config(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyConfig:
    """A factory: `tiny_config({"train.max_steps": 4, "data.seed": 7})` returns a new job mapping.

    Every call has a storage folder of its own, unless `run.storage` is given. The model is a Llama of about
    50,000 parameters, unless there is a `model.factory`.
    """
    base: dict[str, Any] = {
        "run": {"name": "tiny"},
        "data": {
            "sources": [{"name": "stdlib", "path": str(corpus / "*.jsonl"), "format": "jsonl"}],
            "tokenizer": str(corpus / "tokenizer"),
            "window_bytes": 1 << 18,
            "fragment_bytes": 1 << 16,
            "num_tokenizers": 1,
        },
        "pack": {"seq_len": 32},
        "model": {
            "config": {
                "model_type": "llama",
                "vocab_size": TOKENIZER_VOCAB,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "max_position_embeddings": 256,
                "tie_word_embeddings": True,
            }
        },
        "train": {
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "max_steps": 10,
            "lr": 0.001,
            "schedule": "constant",
            "seed": 0,
            "numerics": "invariant",
        },
        "cluster": {"num_workers": 1},
        "resume": {"every_steps": 5},
    }

    def make(changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        config = copy.deepcopy(base)
        config["run"]["storage"] = str(tmp_path_factory.mktemp("runs"))
        for dotted, value in (changes or {}).items():
            section, _, field = dotted.partition(".")
            config.setdefault(section, {})[field] = copy.deepcopy(value)
        if "factory" in config["model"]:
            del config["model"]["config"]
        return config

    return make


@pytest.fixture
def runner(tiny_config: TinyConfig) -> Runner:
    """A run that is started again and again, without a model."""
    from tests.launch.runner import Runner

    return Runner(tiny_config({"train.max_steps": 1000}))


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy in the current folder; `example` is the run."""
    shutil.copytree(EXAMPLE, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy" / "example"


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A `python` for Ray's nodes and for drivers: their workers, and trials of models, begin with everything
    imported.
    """
    if WARM in os.environ:
        yield os.environ[WARM]
        return
    with warm_python.launcher(tmp_path_factory.mktemp("warm")) as program:
        yield program


@contextmanager
def python_is(program: str) -> Iterator[None]:
    """What this process starts as `python`."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(sys, "executable", program)
        yield


@pytest.fixture
def begun_warm(warm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process starts as `python` has all imported when it begins.

    By the test's own `monkeypatch`: two that change one name are undone in the order in which they were made,
    and leave the first's value behind.
    """
    monkeypatch.setattr(sys, "executable", warm)


@contextmanager
def only_what_a_launch_needs() -> Iterator[None]:
    """Heads of Ray begin without log monitor, autoscaler and dashboard, as a launch starts its own."""
    from ray._private.node import Node

    with pytest.MonkeyPatch.context() as changed:
        for name in ("start_log_monitor", "start_monitor", "start_api_server"):
            changed.setattr(Node, name, lambda *_, **__: None)
        changed.setenv("REPORTER_UPDATE_INTERVAL_MS", "3600000")  # nobody asks what the node's processes use
        yield


@pytest.fixture(scope="session")
def head(warm: str) -> Iterator[Any]:
    """A Ray cluster of one node with room for workers and tokenizers; nobody is connected to it."""
    from ray.cluster_utils import Cluster

    with python_is(warm), only_what_a_launch_needs(), pytest.MonkeyPatch.context() as changed:
        # its raylet is never killed, and one that stood still for 10 s would end every test after it
        changed.setenv("RAY_health_check_timeout_ms", "60000")
        made = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 5, "include_dashboard": False, "object_store_memory": 300 << 20},
        )
    yield made
    made.shutdown()


@contextmanager
def connected(head: Any) -> Iterator[None]:
    """This process is connected to the head; one that is already stays so."""
    import ray

    if ray.is_initialized():
        yield
        return
    ray.init(address=head.address, logging_level="ERROR", log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


@pytest.fixture(scope="module")
def cluster(head: Any, warm: str) -> Iterator[Any]:
    """The head; this process is connected to it while the module's tests run."""
    with python_is(warm), connected(head):
        yield head
