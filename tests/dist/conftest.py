"""Fixtures for the tests that run several ranks."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import Host, NoNamespaces, two_hosts
from ranks import shut_down

from object_server import object_server, s3
from shardwise.training.launch.agent import Agent
from shardwise.training.launch.warm_start import WarmStart

__all__ = ["object_server", "s3"]


@pytest.fixture(scope="session", autouse=True)
def _no_worker_outlives_the_session() -> Iterator[None]:
    yield
    shut_down()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts that are network namespaces of this machine."""
    try:
        with two_hosts(tmp_path) as both:
            yield both
    except NoNamespaces as error:
        pytest.skip(f"no network namespaces here: {error}")


@pytest.fixture(scope="session")
def _imported() -> Iterator[WarmStart]:
    """A process that has imported all that a rank of `shardwise train` needs."""
    with pytest.MonkeyPatch.context() as patch:
        # Tasks of tests import from this folder.
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        warm = WarmStart(("shardwise.training.rank_run",), num_threads="1")
    assert warm.is_ready()
    yield warm
    warm.close()


@pytest.fixture(scope="module")
def forked_ranks(_imported: WarmStart) -> Iterator[None]:
    """Launchers in this process fork ranks from a process that they share: one for each would import for seconds."""
    init = Agent.__init__

    def with_warm(self: Agent, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self._warm = _imported

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Agent, "__init__", with_warm)
        patch.setattr(Agent, "close", lambda self: None)
        yield
