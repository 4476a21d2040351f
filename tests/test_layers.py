"""Who may import whom, read from the sources; and what importing the package loads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import orchestrator
from tests.parsed import parsed

PACKAGE = Path(orchestrator.__file__).parent
# each layer may import itself and those before it; rooms of one layer may not import each other
LAYERS = [
    {
        *("callbacks", "errors", "json_form", "objectives", "records", "faults", "paused_gc"),
        *("text", "user_function"),
    },
    {"config", "storage"},
    {"planning", "cluster"},
    {"history"},
    {"checkpoint/files", "checkpoint/node_local"},
    {"data", "trainer", "elastic"},
    {"checkpoint"},
    {"coordinator"},
    {"launch"},
    {"torchrun", "inspect"},
    {"cli", "__init__"},
]
LEVEL = {name: number for number, names in enumerate(LAYERS) for name in names}
APART = LAYERS[1:10]  # the layers whose rooms exchange records only
WITHOUT_RAY_AND_TORCH = (
    "errors.py",
    "json_form.py",
    "records/",
    "faults.py",
    "paused_gc.py",
    "text.py",
    "user_function.py",
    "config/",
    "storage/",
    "planning/",
    "cluster/machine.py",
    "history/",
    "data/sources/",
    "data/packing/",
    "elastic/next_formation.py",
    "elastic/drain.py",
    "elastic/supervision/policy.py",
    "elastic/rendezvous.py",
    "elastic/formation.py",
    "checkpoint/",
    "coordinator/attempt/attempt.py",
    "coordinator/attempt/resume_point_choice.py",
    "coordinator/attempt/launch_attempts.py",
    "coordinator/coordinator_start.py",
    "coordinator/machine/launch_actions.py",
    "coordinator/machine/launch_machine.py",
    "coordinator/pending_calls.py",
    "coordinator/machine/launch_history.py",
    "coordinator/attempt/survey.py",
    "launch/process/launch_report.py",
    "launch/start/attempt_claim.py",
    "launch/capacity/placement_check.py",
    "launch/start/preview.py",
    "launch/member/coordinator_calls.py",
    "launch/start/run_preparation.py",
    "launch/process/stop_signals.py",
    "launch/process/progress.py",
    "launch/capacity/resource_estimate.py",
    "torchrun/coordinator_process.py",
    "inspect/",
)
WITHOUT_RAY = ("trainer/", "torchrun/")


def part_of(name: str) -> str:
    """The part of `LAYERS` to which a module belongs. `name` is its path in the package, without suffix."""
    parts = name.split("/")
    folder = "/".join(parts[:2])
    return folder if folder in LEVEL else parts[0]


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


SOURCES = sorted(PACKAGE.rglob("*.py"))
MODULES = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in SOURCES}


@cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, whether it is imported when the file is), for imports that happen at all, not for types."""
    found: list[tuple[str, bool]] = []

    def walk(node: ast.AST, at_top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                found.extend((alias.name, at_top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                names = [child.module, *(f"{child.module}.{alias.name}" for alias in child.names)]
                found.extend((name, at_top) for name in names[:1] + [n for n in names[1:] if n in MODULES])
            walk(child, at_top and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    walk(parsed(path), True)
    return found


def test_imports_go_one_way() -> None:
    parts = {path: part_of(name_of(path)) for path in SOURCES}
    unknown = {*parts.values()} - LEVEL.keys()
    assert not unknown, f"{unknown} are in no layer: give each one here and in CONTRIBUTING.md"
    for path, part in parts.items():
        for module, _ in imports(path):
            if module.split(".")[0] != "orchestrator" or part == "__init__":
                continue
            other = part_of("/".join([*module.split(".")[1:], "__init__"]))
            if other == "__init__":
                continue
            assert LEVEL[other] <= LEVEL[part], f"{path} imports {module}, which is above it"
            beside = any(part in layer and other in layer for layer in APART)
            same_room = other.partition("/")[0] == part.partition("/")[0]
            assert same_room or not beside, f"{path} imports {other}, which stands beside it"


@pytest.mark.parametrize("of", ["files", "folders"])
def test_imports_make_no_circle(of: str) -> None:
    graph: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        if path.name == "__init__.py":
            continue
        for other in {module for module, _ in imports(path)} & MODULES.keys():
            here, there = (each if of == "files" else each.rpartition(".")[0] for each in (name, other))
            if here != there:
                graph.setdefault(here, set()).add(there)
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_no_module_imports_from_a_module_of_tests() -> None:
    """What several test modules use lies in a module of its own, or as a fixture in a conftest.py."""
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                assert not MODULE_OF_TESTS.search(name), f"{path} imports {name}: move what both use"


def test_ray_and_torch_are_imported_only_where_they_are_used() -> None:
    for path in SOURCES:
        name = str(path.relative_to(PACKAGE))
        for module, _ in imports(path):
            root = module.split(".")[0]
            assert root != "ray" or not name.startswith(WITHOUT_RAY), f"{name} also runs under plain torchrun"
            assert root not in ("ray", "torch", "transformers") or not name.startswith(
                WITHOUT_RAY_AND_TORCH
            ), f"{name} imports {module}"


MODULE_OF_TESTS = re.compile(r"^tests\.(.*\.)?test_\w+")

# modules and attributes that Ray does not document, names of variables that it reads
PRIVATE_RAY = re.compile(r"\bray(\.\w+)*(\._|\.core\.|\.v2\.)|^RAY_\w+$")

PRIVATE_MODULE = re.compile(r"\bray(\.\w+)*(\._(?!_)|\.core\.|\.v2\.)")


def private_parts_of_ray(tree: ast.AST) -> Iterator[str]:
    """What a source imports, reaches, or names of them in a string; not what its texts tell of them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [f"{alias.name}." for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}." for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            names = [node.value]
        else:
            continue
        yield from filter(PRIVATE_RAY.search, names)


def test_private_parts_of_ray_are_reached_from_cluster_alone() -> None:
    outside = [path for path in SOURCES if part_of(name_of(path)) != "cluster"]
    found = {path: list(private_parts_of_ray(parsed(path))) for path in outside}
    assert not any(found.values()), f"move {[path for path in found if found[path]]} to {PACKAGE / 'cluster'}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "cluster").glob("*.py")), ids=lambda path: path.name)
def test_cluster_reaches_private_modules_of_ray_by_its_list_alone(path: Path) -> None:
    found = list(filter(PRIVATE_MODULE.search, private_parts_of_ray(parsed(path))))
    assert path.name == "ray_inventory.py" or not found, f"give {found} a place in ray_inventory.py"


@pytest.mark.parametrize(
    "source",
    [
        "import ray._private.state",
        "from ray import _private",
        "from ray._private.state import actors",
        "from ray.core.generated import gcs_pb2",
        "from ray.train.v2.api import data_parallel_trainer",
        "import ray\nray._private.worker._global_node",
        "import os\nos.environ.setdefault('RAY_DATA_USAGE_DISABLED', '1')",
        "import importlib\nimportlib.import_module('ray.data._internal.stats')",
    ],
)
def test_every_way_to_a_private_part_of_ray_is_seen(source: str) -> None:
    assert list(private_parts_of_ray(ast.parse(source)))


def test_looking_at_a_run_loads_neither_ray_nor_torch() -> None:
    code = (
        "import sys, orchestrator.launch.api, orchestrator.inspect.run, orchestrator.cli.commands;"
        "import orchestrator.cli.tables, orchestrator.data.dataset;"
        "print([m for m in ('ray', 'torch', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_a_command_that_reads_a_run_loads_only_what_it_needs() -> None:
    code = (
        "import sys, orchestrator.cli.commands as c, orchestrator.inspect.run\n"
        "try: c.main(['points', sys.argv[1]])\n"
        "except SystemExit: pass\n"
        "slow = 'ray torch transformers pyarrow numpy asyncio fastapi orchestrator.config.schema'\n"
        "print([m for m in slow.split() if m in sys.modules])"
    )
    example = Path(__file__).with_name("examples") / "format2" / "example"
    command = [sys.executable, "-c", code, str(example)]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    assert out.stdout.splitlines()[-1] == "[]"


def test_the_public_api_is_small_and_complete() -> None:
    assert len(orchestrator.__all__) <= 14
    for name in orchestrator.__all__:
        assert callable(getattr(orchestrator, name)), name
    with pytest.raises(AttributeError) as absent:
        orchestrator.nothing  # noqa: B018
    assert (absent.value.name, absent.value.obj) == ("nothing", orchestrator)
