"""The lines of a program are told from those that torch's libraries print as its process ends."""

from shardwise.base.vocabulary.process_output import own_lines

WRITTEN = """the reason
nanobind: leaked 4 instances!
 - leaked instance 0x7f5b42dd5d28 of type "triton._C.libtriton.ir.attribute"
 - ... skipped remainder
nanobind: this is likely caused by a reference counting issue in the binding code.
See https://nanobind.readthedocs.io/en/latest/refleaks.html
"""


def test_the_last_line_of_a_program_is_its_own() -> None:
    assert own_lines(WRITTEN) == ["the reason"]
    assert own_lines("USDT: probes\n - a list\nsee nanobind: yes") == [" - a list", "see nanobind: yes"]
