"""Fixtures for every test: nothing may leak from one into the next."""

import gc
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

from reliability.ledger import claims
from reliability.recorder import Recorder
from reliability.said import take

# Examples are the same on every run, and no deadline depends on the machine's load.
settings.register_profile("whole", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("usual", settings.get_profile("whole"), max_examples=40)
settings.load_profile("usual")

# Tests are small, and the machine is busy with their processes: threads would wait for each other, turning, many times
# longer than one computes. The variable is for processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
HAS_GPU = Path("/dev/nvidiactl").exists()


class _SetsUpTorch(MetaPathFinder):
    """Sets up torch when a test imports it: those of the planner, the reports and the commands run without it."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = find_spec("torch")
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def run_and_set_up(module: ModuleType) -> None:
            run(module)
            module.set_num_threads(1)
            # As in ranks.py: a CPU without bf16 turns oneDNN off at its first product in bf16, so that a test in fp32
            # would depend on those before it.
            module._C._set_mkldnn_enabled(False)

        spec.loader.exec_module = run_and_set_up  # type: ignore[method-assign]
        return spec


assert "torch" not in sys.modules, "what this file imports has imported torch, which nothing sets up any more"
sys.meta_path.insert(0, _SetsUpTorch())

# Processes that tests start begin with tests/started/sitecustomize.py; not where they measure a GPU's memory, which cycles
# of references would hold for longer.
if not HAS_GPU:
    _STARTED = str(Path(__file__).parent / "started")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), _STARTED)))

# What one test has traced is for the others of this run as well, also in other processes, but not for the next run.
_CACHE = tempfile.TemporaryDirectory(prefix="shardwise-cache-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name

# Set by pytest for each test, by torch and scikit-learn when they are first imported, and by what torch compiles with.
_SET_BY_LIBRARIES = ("PYTEST_", "TORCHINDUCTOR_", "TRITON_", "KMP_")


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    before, had_group = dict(os.environ), _has_group()
    take()
    yield
    changed = {
        name
        for name in before.keys() | os.environ.keys()
        if before.get(name) != os.environ.get(name) and not name.startswith(_SET_BY_LIBRARIES)
    }
    assert not changed, f"the test leaks environment variables: {sorted(changed)}"
    assert had_group or not _has_group(), "the test leaks a process group"


def _has_group() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="also what the usual run has no time for")
    parser.addoption(
        "--reliability", action="store_true", help="run what is marked `ledger`, write docs/reliability.md"
    )


def pytest_collection_finish() -> None:
    # All that is imported stays. Without this, every full garbage collection walks through it again.
    gc.collect()
    gc.freeze()
    # A trace or a plan makes a million objects without a cycle: collecting after each 700 of them takes seconds.
    gc.set_threshold(50_000, 20, 20)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--whole"):
        settings.load_profile("whole")
    if config.getoption("--reliability"):
        config.pluginmanager.register(Recorder())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is no CUDA device; those marked `whole` are left out without --whole.

    With --reliability those that are marked `ledger` run, also if they are marked `whole`, and no others. A marker that
    is wrong is refused in any run.
    """
    if not config.getoption("--whole") and not config.getoption("--reliability"):
        left_out = [item for item in items if item.get_closest_marker("whole")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("whole")]
    in_ledger = [item for item in items if claims(item)]
    if config.getoption("--reliability"):
        config.hook.pytest_deselected(items=[item for item in items if item not in in_ledger])
        items[:] = in_ledger
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not HAS_GPU:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
