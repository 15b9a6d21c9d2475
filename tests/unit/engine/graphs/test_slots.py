"""Slots of gathered units: two that are gathered at the same time never share one, and few are used."""

import pytest
from planned_specs import spec_for

from shardwise.engine.graphs.slots import slot_numbers
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh
from shardwise.program import Kind, StepProgram, build

MESH = Mesh(shard=8)


def program_of(strategy: str, *, prefetch: int) -> StepProgram:
    return build(spec_for("gpt2-124m"), plan=Plan(strategy=strategy, prefetch=prefetch), mesh=MESH)


def units_of(program: StepProgram) -> list[str]:
    return list(dict.fromkeys(row.unit for row in program.rows if row.unit))


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("strategy", ["fsdp", "shard_grad_op"])
def test_units_that_are_gathered_together_have_slots_of_their_own(strategy: str, prefetch: int) -> None:
    program = program_of(strategy, prefetch=prefetch)
    numbers = slot_numbers(program, units=units_of(program))
    held: dict[int, str] = {}
    for row in [*program.rows, *program.rows]:
        for operation in row.operations:
            number = numbers.get(operation.subject)
            if operation.kind is Kind.GATHER and number is not None:
                assert held.get(number, operation.subject) == operation.subject
                held[number] = operation.subject
            elif operation.kind is Kind.FREE and number is not None and held.get(number) == operation.subject:
                del held[number]


def test_fsdp_needs_few_slots() -> None:
    program = program_of("fsdp", prefetch=1)
    assert len(set(slot_numbers(program, units=units_of(program)).values())) <= 5
