"""Each row of the layout imports only rows above it, and what promises to be free of torch is."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import shardwise

SOURCE = Path(shardwise.__file__).parent

# The rooms from the bottom up: each may import itself and those before it.
ROWS: list[set[str]] = [
    {"base"},
    {"plan"},
    {"program"},
    {"hardware"},
    {"planner"},
    {"comm"},
    {"engine"},
    # What users call on a model; it hands the engine predictions for its errors.
    {"engines"},
    # Models mark which of their rows are padding, and read and write files of weights.
    {"state"},
    {"models"},
    {"training"},
    {"measure"},
    {"doors"},
    # The public names: of the package, of its integrations and of its checkpoints.
    {"__init__", "__main__", "integrations", "checkpoint"},
]
WITHOUT_TORCH = [
    "shardwise",
    "shardwise.comm.autopsy.record_folder",
    "shardwise.comm.autopsy.findings",
    "shardwise.doors.cli.app",
    "shardwise.comm.job.job_environment",
    "shardwise.training.loading.sampler",
    "shardwise.hardware",
    "shardwise.hardware.measuring.device_file",
    "shardwise.hardware.host_here",
    "shardwise.hardware.measuring.nccl_tests",
    "shardwise.measure.bench.benchmark",
    "shardwise.measure.bench.contestants",
    "shardwise.measure.bench.equivalence",
    "shardwise.measure.bench.prediction",
    "shardwise.measure.profile.compare",
    "shardwise.models.catalogue",
    "shardwise.plan.placement",
    "shardwise.plan",
    "shardwise.planner.search.recommend",
    "shardwise.planner.search.scale",
    "shardwise.planner.search.auto",
    "shardwise.planner.search.candidates",
    "shardwise.planner.search.frontier",
    "shardwise.measure.report.text.budgets",
    "shardwise.program",
    "shardwise.measure.report.page.anatomy",
    "shardwise.measure.report.text.comparison",
    "shardwise.measure.report.text.costs",
    "shardwise.measure.report.text.step_picture",
    "shardwise.measure.report.text.queue_lanes",
    "shardwise.measure.report.text.verdict",
    "shardwise.measure.report.text.profile_table",
    "shardwise.measure.report.page",
    "shardwise.measure.report.planner_page.planner_server",
    "shardwise.measure.report.perfetto",
    "shardwise.measure.bench.tape_spans",
    "shardwise.measure.report.text.ring_rounds",
    "shardwise.models.reference",
    "shardwise.base.torch_internals.torch_private",
    "shardwise.program.spec",
    "shardwise.models.specs.architecture",
    "shardwise.models.specs.spec_store",
    "shardwise.training.config.config",
    "shardwise.training.launch.failure",
    "shardwise.training.launch.folder_lock",
    "shardwise.training.launch.rank_process",
    "shardwise.training.config.learning_rate",
]


def part(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def row_of(name: str) -> int:
    rows = [index for index, row in enumerate(ROWS) if name in row]
    assert rows, f"shardwise.{name} has no row in the layout: give it one"
    return rows[0]


@cache
def modules() -> dict[str, Path]:
    """Dotted name → file; a package goes by its own name."""
    return {
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in SOURCE.rglob("*.py")
    }


def imports_of(tree: ast.AST, known: dict[str, Path]) -> set[str]:
    """The modules that a file imports, also inside functions, for type checking, and by `import_module("…")`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in known else str(node.module) for name in full}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and last_name(node.func) in ("import_module", "__import__"):
            found |= names_in(node, known)
    return found & known.keys()


def last_name(node: ast.expr) -> str:
    """`import_module` of `importlib.import_module` and of `import_module`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def names_in(tree: ast.AST, known: dict[str, Path]) -> set[str]:
    """The modules that a file names in a string, as an import or a command (`-m`) does; of f"shardwise.x.{y}", x."""
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {string.rstrip(".") for string in strings} & known.keys()


@cache
def imported_and_named(source: str) -> tuple[set[str], set[str]]:
    """The modules that a file imports, and those that it names in a string."""
    known, tree = modules(), ast.parse(source)
    return imports_of(tree, known), names_in(tree, known)


def upward(source: str, *, row: int) -> set[str]:
    """The modules above a row that a file of it imports or names."""
    imported, named = imported_and_named(source)
    # In a string, "shardwise" is the engine's name as well.
    return {name for name in imported | named - {"shardwise"} if row_of(f"{name}.__init__".split(".")[1]) > row}


def test_of_the_program_only_the_naive_executor_and_units_import_torch() -> None:
    """The executor belongs to the program, and not to the engine that is compared with it; units are made of modules.

    The planner imports neither.
    """
    files = [path for path in (SOURCE / "program").rglob("*.py") if path.parent.name != "units"]
    trees = {path.name: ast.walk(ast.parse(path.read_text())) for path in files}
    assert {name for name, nodes in trees.items() if any(map(imports_torch, nodes))} == {"naive.py"}


def test_the_engine_imports_nothing_of_the_planner() -> None:
    """Predictions in its errors are handed to it."""
    for path in sorted((SOURCE / "engine").rglob("*.py")):
        imported, named = imported_and_named(path.read_text())
        found = {name for name in imported | named if name.startswith("shardwise.planner")}
        assert not found, f"{path.name} imports {', '.join(found)}"


def imports_torch(node: ast.AST) -> bool:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
    return any(name.split(".")[0] == "torch" for name in names)


def test_every_import_goes_downward() -> None:
    for path in sorted(SOURCE.rglob("*.py")):
        above = upward(path.read_text(), row=row_of(part(path)))
        assert not above, f"{path.relative_to(SOURCE)} imports {', '.join(above)}, which is above it"


def test_the_engines_core_imports_nothing_of_its_guests() -> None:
    """Guards, graphs, optimizers, host memory and fp8 attach themselves to it."""
    core = SOURCE / "engine" / "core"
    for path in sorted(core.rglob("*.py")):
        imported = {name for name in imported_and_named(path.read_text())[0] if name.startswith("shardwise.engine.")}
        beneath = ("shardwise.engine.core.", "shardwise.engine.hooks.")
        guests = {name for name in imported if not f"{name}.".startswith(beneath)}
        assert not guests, f"{path.name} imports {', '.join(guests)}"


def test_checkpoints_and_recovery_import_no_internals_of_the_engine() -> None:
    """What a rank holds of any model, an average of it, and the states of random generators: no buffers, no core."""
    allowed = {"owned_model", "prepared.average", "random_states", "torch_engine.plain_model"}
    for path in sorted((SOURCE / "state").rglob("*.py")):
        imported = imported_and_named(path.read_text())[0]
        inner = {name.removeprefix("shardwise.engine.") for name in imported if name.startswith("shardwise.engine.")}
        assert inner <= allowed, f"{path.name} imports {inner - allowed}"


@pytest.mark.parametrize(
    "source",
    [
        "from shardwise.training import automatic",
        "from shardwise import Plan",
        "def f():\n    import shardwise.training.fitting.automatic",
        "def f():\n    importlib.import_module('shardwise.training.fitting.automatic')",
        "__import__('shardwise.training')",
        "import_module(f'shardwise.training.{name}')",
        "PROGRAM = 'shardwise.training.fitting.automatic'",
    ],
)
def test_an_import_that_hides_is_found(source: str) -> None:
    assert upward(source, row=row_of("plan"))
    assert not upward(source, row=row_of("__init__"))


def test_the_root_has_at_most_six_modules() -> None:
    """`python -m shardwise` and the package itself count; errors.py is the only one that the design names."""
    assert len(list(SOURCE.glob("*.py"))) <= 6, sorted(path.name for path in SOURCE.glob("*.py"))


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
    files = {name: imported_and_named(path.read_text())[0] for name, path in known.items()}
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
        if path.name != "__init__.py" and path.parent.name not in ("cli", "torch_engine")
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
