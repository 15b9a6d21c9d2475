"""Fixtures for the tests that run several ranks."""

from collections.abc import Iterator

import pytest
from ranks import shut_down


@pytest.fixture(scope="session", autouse=True)
def _no_worker_outlives_the_session() -> Iterator[None]:
    yield
    shut_down()
