"""What escapes from a unit, or enters it, besides its arguments and its result: equal to plain torch (escaping.py).

`pytest --whole -s tests/dist/test_escaping.py` runs all programs under two strategies and prints the table.
"""

from collections import Counter

import escaping_arguments
import escaping_functions
import escaping_hooks
import escaping_lookups
import escaping_python
import escaping_random
import escaping_results
import escaping_settings
import escaping_state
import escaping_tensors
import escaping_torch
import pytest
from escaping import Ending, Program, ending
from ranks import run_ranks

PROGRAMS: dict[str, Program] = {
    **escaping_state.PROGRAMS,
    **escaping_settings.PROGRAMS,
    **escaping_random.PROGRAMS,
    **escaping_arguments.PROGRAMS,
    **escaping_results.PROGRAMS,
    **escaping_hooks.PROGRAMS,
    **escaping_torch.PROGRAMS,
    **escaping_python.PROGRAMS,
    **escaping_lookups.PROGRAMS,
    **escaping_tensors.PROGRAMS,
    **escaping_functions.PROGRAMS,
}
# Programs of the usual run: one of each kind.
USUAL = (
    *(
        "nothing_escapes",
        "attribute_scale",
        "activation_kept_on_module",
        "moving_mean_in_place",
        "buffer_replaced",
        "moving_square_in_place",
    ),
    *(
        "statistics_of_two_forwards",
        "config_swapped_for_another",
        "dropout_that_nobody_uses",
        "list_argument_grows",
        "keywords_in_another_order",
    ),
    *("dict_out", "empty_tuple_out", "returns_a_view_of_its_input", "hook_that_goes_again", "own_function"),
    *("checkpoint_inside", "recomputed_with_buffers", "branch_by_a_value", "error_in_a_unit", "two_models_in_turn"),
    "checkpoint_around_buffers",
    *("counter_of_the_class", "exception_as_control_flow", "attribute_added_later", "value_by_numpy", "vmap_inside"),
)
# Programs that end differently on graphs, and how. In the first a unit and something else use one tensor, so that gradients
# are added up in another order; of the other one nobody can know.
WRONG = {"returns_its_input_too": "rounding", "patched_function_of_torch": "different"}


def endings(rank: int, names: tuple[str, ...], strategy: str, graphs: bool) -> dict[str, Ending]:
    return {name: ending(PROGRAMS[name], strategy=strategy, graphs=graphs) for name in names}


def table(names: tuple[str, ...], *, strategy: str, graphs: bool) -> dict[str, Ending]:
    return run_ranks(endings, num_ranks=1, args=(names, strategy, graphs), timeout_seconds=800.0)[0]


@pytest.mark.timeout(300)
def test_usual_programs_are_equal_to_plain_torch() -> None:
    found = table(USUAL, strategy="fsdp", graphs=True)
    wrong = {name: one for name, one in found.items() if one.verdict != "equal"}
    assert {name: one.verdict for name, one in wrong.items()} == {name: WRONG[name] for name in USUAL if name in WRONG}


@pytest.mark.whole
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
@pytest.mark.parametrize("graphs", [False, True])
def test_programs_are_equal_to_plain_torch(strategy: str, graphs: bool) -> None:
    found = table(tuple(PROGRAMS), strategy=strategy, graphs=graphs)
    for name, one in found.items():
        print(f"{name}: {one.verdict} {one.why} {one.num_replayed} of {one.num_calls} {'; '.join(one.reasons)}")
    print(Counter(one.verdict for one in found.values()), sum(one.replays for one in found.values()), "replay mostly")
    wrong = {name: one.verdict for name, one in found.items() if one.verdict != "equal"}
    assert wrong == (WRONG if graphs else {})
