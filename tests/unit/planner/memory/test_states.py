"""What a rank holds of a unit, by its placement."""

import pytest

from shardwise.base.errors import UnknownName
from shardwise.base.vocabulary.layout import lay_out
from shardwise.plan import Plan
from shardwise.plan.placement import SHARDED, STRATEGIES, Mesh
from shardwise.planner.memory.constants import RULES
from shardwise.planner.memory.states import OPTIMIZERS, StateSetting, optimizer_of, unit_states
from shardwise.program.spec import TensorSpec, UnitSpec

UNIT = UnitSpec(
    name="block",
    class_name="Block",
    params=(TensorSpec(name="block.a", shape=(1000, 64)), TensorSpec(name="block.b", shape=(7,))),
)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_state_is_whole_or_a_slice(strategy: str, precision: str) -> None:
    placement = STRATEGIES[strategy]
    held = unit_states(
        UNIT,
        placement=placement,
        setting=StateSetting(
            plan=Plan(strategy=strategy, precision=precision),
            mesh=Mesh(shard=4),
            optimizer=OPTIMIZERS["adamw-foreach"],
            rules=RULES["cpu"],
        ),
    )
    whole = 4 * lay_out([(1000, 64), (7,)], num_slices=4).num_elements
    computes = whole if precision == "fp32" else whole // 2
    assert held.full == computes
    assert held.reduce == whole
    assert held.grads == (whole // 4 if placement.grads is SHARDED else whole)
    # A slice that computes as it is stepped is the parameter; any other master is the optimizer's.
    master = whole // 4 if placement.optim is SHARDED else whole
    is_the_parameter = placement.params is SHARDED and precision == "fp32"
    separate = placement.params is SHARDED or precision == "bf16"
    assert held.params == (0 if placement.params is SHARDED else computes) + (master if is_the_parameter else 0)
    moments = held.optim - (master if separate and not is_the_parameter else 0)
    assert moments == pytest.approx(2 * master, rel=0.01)


@pytest.mark.parametrize("update", ["device", "host"])
def test_states_in_host_memory_take_nothing_but_step_counts(update: str) -> None:
    plan = Plan(strategy="fsdp", precision="bf16", offload_states=True, offload_update=update)
    held = unit_states(
        UNIT,
        placement=STRATEGIES["fsdp"],
        setting=StateSetting(plan=plan, mesh=Mesh(shard=4), optimizer=OPTIMIZERS["adamw-fused"], rules=RULES["cuda"]),
    )
    counts = held.optim if update == "device" else 0
    assert (held.params, held.optim) == (0, counts)
    assert counts == 512 * len(held.moments)
    assert held.full > 0
    # Master, parameters in bf16 and two moments of each element; with the CPU's update also its gradient.
    assert held.host >= (14 if update == "device" else 18) * sum(param.num_elements for param in UNIT.params) // 4


def test_an_unknown_optimizer_is_one_line() -> None:
    with pytest.raises(UnknownName, match="did you mean adam or adamw"):
        optimizer_of("adamv")
