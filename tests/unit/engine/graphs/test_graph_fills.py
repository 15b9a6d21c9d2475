"""Which memsets of a graph become kernels, and the words that these write."""

import ctypes

import pytest

from shardwise.engine.graphs.graph_fills import _Kernel, _Memset


def memset(**options: int) -> _Memset:
    return _Memset(**{"place": 4096, "value": 0, "element_bytes": 1, "width": 64, "height": 1, **options})


@pytest.mark.parametrize(
    ("element_bytes", "value", "word"), [(1, 0xAB, 0xABABABAB), (2, 0xABCD, 0xABCDABCD), (4, 0x12345678, 0x12345678)]
)
def test_a_word_repeats_the_value(element_bytes: int, value: int, word: int) -> None:
    assert memset(element_bytes=element_bytes, value=value).word == word


def test_small_ones_of_whole_words_are_replaced() -> None:
    assert memset().is_small
    assert memset(width=2**18, element_bytes=4).is_small
    assert not memset(width=2**18 + 1, element_bytes=4).is_small
    assert not memset(width=0).is_small
    assert not memset(width=63).is_small
    assert not memset(place=4098).is_small
    assert not memset(height=2).is_small


def test_structures_have_the_drivers_sizes() -> None:
    assert ctypes.sizeof(_Memset) == 40
    assert ctypes.sizeof(_Kernel) == 72
