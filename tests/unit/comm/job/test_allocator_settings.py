"""Where ranks start with segments that expand."""

import sys

import pytest
import torch

from shardwise.comm.job.allocator_settings import allocator_settings

NAME, ON = "PYTORCH_ALLOC_CONF", "expandable_segments:True"


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (NAME, "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def test_with_cuda_they_expand() -> None:
    assert allocator_settings() == {NAME: ON}


@pytest.mark.parametrize(("owner", "name", "value"), [(torch.version, "cuda", None), (sys, "platform", "win32")])
def test_elsewhere_nothing_is_set(owner: object, name: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, value)
    assert allocator_settings() == {}


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "expandable_segments:False")
    assert allocator_settings() == {}
