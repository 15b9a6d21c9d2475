"""Fixtures for the tests that run several ranks."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Host, NoNamespaces, two_hosts
from ranks import shut_down


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
