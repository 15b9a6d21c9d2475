"""Each row of the layout imports only rows above it, and what promises to be free of torch is."""

import ast
import subprocess
import sys
from pathlib import Path

import shardwise

SOURCE = Path(shardwise.__file__).parent

# From the bottom up. A row may import itself and the rows before it.
ROWS: list[set[str]] = [
    {"errors"},
    {"vocabulary"},
    {"files"},
    {"autopsy"},
    {"plan"},
    {"spec"},
    {"hardware"},
    {"units"},
    {"program"},
    {"planner"},
    {"comm"},
    {"engine"},
    {"torch_engine"},
    {"engines"},
    {"data", "models"},
    {"tasks"},
    {"checkpoint"},
    {"trace"},
    {"sources"},
    {"launch"},
    {"profile"},
    {"train"},
    {"integrations"},
    {"bench"},
    {"report"},
    {"interchange"},
    {"cli"},
    {"__init__", "__main__"},
]
WITHOUT_TORCH = [
    "shardwise",
    "shardwise.autopsy.record_folder",
    "shardwise.autopsy.findings",
    "shardwise.cli.app",
    "shardwise.comm.job_environment",
    "shardwise.data.sampler",
    "shardwise.hardware",
    "shardwise.hardware.device_file",
    "shardwise.hardware.host_here",
    "shardwise.hardware.nccl_tests",
    "shardwise.bench.benchmark",
    "shardwise.bench.contestants",
    "shardwise.bench.equivalence",
    "shardwise.bench.prediction",
    "shardwise.profile.compare",
    "shardwise.models.catalogue",
    "shardwise.plan.placement",
    "shardwise.plan",
    "shardwise.planner.search.recommend",
    "shardwise.planner.search.scale",
    "shardwise.planner.search.auto",
    "shardwise.planner.search.candidates",
    "shardwise.planner.search.frontier",
    "shardwise.report.text.budgets",
    "shardwise.program",
    "shardwise.report.page.anatomy",
    "shardwise.report.text.comparison",
    "shardwise.report.text.costs",
    "shardwise.report.text.step_picture",
    "shardwise.report.text.queue_lanes",
    "shardwise.report.text.verdict",
    "shardwise.report.text.profile_table",
    "shardwise.report.outline",
    "shardwise.report.page",
    "shardwise.report.planner_page.planner_server",
    "shardwise.report.perfetto",
    "shardwise.report.tape_spans",
    "shardwise.report.text.ring_rounds",
    "shardwise.sources",
    "shardwise.spec",
    "shardwise.spec.shipped",
    "shardwise.train.config",
    "shardwise.launch.failure",
    "shardwise.launch.folder_lock",
    "shardwise.launch.rank_process",
    "shardwise.train.learning_rate",
]


def part(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def row_of(name: str) -> int:
    rows = [index for index, row in enumerate(ROWS) if name in row]
    assert rows, f"shardwise.{name} has no row in the layout: give it one"
    return rows[0]


def imported(path: Path) -> set[str]:
    """The parts of the package that a file imports, also inside functions and for type checking."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            modules = [node.module or ""]
            if node.module == "shardwise":
                modules = [f"shardwise.{alias.name}" for alias in node.names if (SOURCE / alias.name).exists()]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        found |= {module.split(".")[1] for module in modules if module.startswith("shardwise.")}
    return found


def test_every_import_goes_downward() -> None:
    for path in sorted(SOURCE.rglob("*.py")):
        here = part(path)
        for other in imported(path):
            assert row_of(other) <= row_of(here), (
                f"{path.relative_to(SOURCE)} imports shardwise.{other}, which is above it"
            )


def modules() -> dict[str, Path]:
    """Dotted name → file; a package goes by its own name."""
    return {
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in SOURCE.rglob("*.py")
    }


def imports_of(path: Path, known: dict[str, Path]) -> set[str]:
    """The modules that a file imports, also inside functions and for type checking."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in known else node.module for name in full}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & known.keys()


def room(path: Path) -> str:
    """A folder of files; in a package with rooms of its own, a file beside them is a room by itself."""
    folder = path.parent
    has_rooms = any((inner / "__init__.py").exists() for inner in folder.iterdir() if inner.is_dir())
    return str((path if has_rooms and path.name != "__init__.py" else folder).relative_to(SOURCE))


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Names that import each other in a circle, if any do."""
    left = {name: set(others) - {name} for name, others in graph.items()}
    while True:
        imported = set().union(*left.values())
        free = [name for name, others in left.items() if not others & left.keys() or name not in imported]
        if not free:
            return sorted(left)
        for name in free:
            del left[name]


def test_no_file_and_no_room_is_part_of_a_circle_of_imports() -> None:
    known = modules()
    files = {name: imports_of(path, known) for name, path in known.items()}
    assert cycle(files) == []
    rooms: dict[str, set[str]] = {}
    for name, others in files.items():
        rooms.setdefault(room(known[name]), set()).update(room(known[other]) for other in others)
    assert cycle(rooms) == []


def test_a_file_name_says_where_one_is() -> None:
    """A command's file is named after the command, and torch's engine mirrors ours; all other names are used once."""
    names = [
        path.name
        for path in SOURCE.rglob("*.py")
        if path.name != "__init__.py" and part(path) not in ("cli", "torch_engine")
    ]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_a_class_name_has_one_meaning() -> None:
    """But for the blocks of transformers, which are all just that."""
    names = [
        node.name
        for path in SOURCE.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert {name for name in names if names.count(name) > 1} <= {"Block"}


def test_what_promises_no_torch_imports_none() -> None:
    """One process for all: if any imports torch, find which."""
    code = "import sys, importlib\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n    assert 'torch' not in sys.modules, name"
    result = subprocess.run([sys.executable, "-c", code, *WITHOUT_TORCH], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
