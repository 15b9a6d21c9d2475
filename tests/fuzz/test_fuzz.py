"""Random compositions of models, plans and events are equal to one process of plain torch, or refused in one line."""

from collections import Counter
from pathlib import Path

import pytest
import rank_world
from compositions import NOT_CALLED, Case, Event, all_pairs, draw_case, with_graphs
from drawn_plans import is_narrow, unlisted
from open_faults import OPEN_FAULTS, why_left_out
from outcomes import cut_down, outcome, outcomes
from parts import PARTS, Part
from whole import whole

import shardwise

NUM_SEEDS = 300
# Of them, in the usual run.
NUM_USUAL = 60


def step(**settings: object) -> Event:
    return Event(kind="step", settings=settings)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_ranks", "num_seeds"), [(2, NUM_USUAL), *whole((2, NUM_SEEDS), (3, NUM_SEEDS))])
def test_random_compositions_are_right_or_refused(num_ranks: int, num_seeds: int) -> None:
    cases = [draw_case(seed, num_ranks=num_ranks) for seed in range(num_seeds)]
    tried = [case for case in cases if not why_left_out(case)]
    kinds: Counter[str] = Counter()
    failed = None
    for case, found in outcomes(tried, num_ranks=num_ranks):
        kinds[found.kind] += 1
        failed = failed or (case if found.kind == "failed" else None)
    if failed:
        small, found = cut_down(failed, num_ranks=num_ranks, most=40)
        pytest.fail(f"{kinds}; the first, cut down:\n{small}\n{found.line}")
    assert kinds["equal"] > 0.75 * len(tried)


def test_every_key_of_a_plan_is_drawn_or_left_out_for_a_reason() -> None:
    assert unlisted() == set()


def test_every_public_function_is_called_by_an_event_or_left_out_for_a_reason() -> None:
    source = Path(rank_world.__file__).read_text()
    called = {name for name in shardwise.__all__ if f"shardwise.{name}(" in source}
    assert {*called, *NOT_CALLED} == set(shardwise.__all__)
    assert not called & NOT_CALLED.keys()


def test_features_of_cases_are_those_that_pairs_are_counted_of() -> None:
    named = {name for pair in all_pairs() for name in pair}
    drawn = [draw_case(seed, num_ranks=2).features() for seed in range(2000)]
    assert set().union(*drawn) == named


def test_open_faults_concern_few_cases() -> None:
    cases = [draw_case(seed, num_ranks=2) for seed in range(2000)]
    left_out = [case for case in cases if why_left_out(case)]
    assert len(left_out) < len(cases) / 8, Counter(map(why_left_out, left_out))
    assert {why_left_out(case) for case in left_out} == set(OPEN_FAULTS)


@pytest.mark.parametrize("how", ["recompute selective", "offload_activations True"])
@pytest.mark.parametrize("kind", ["gated", "recurrent"])
def test_parts_of_one_storage_that_are_written_in_place_are_kept_apart(how: str, kind: str) -> None:
    key, value = how.split()
    plan = {"strategy": "fsdp", key: value if key == "recompute" else True}
    case = Case(parts=(Part(kind=kind), Part(kind=kind)), plan=plan, events=(step(), step()))
    assert outcome(case, num_ranks=2).kind == "equal"


@pytest.mark.parametrize("strategy", ["shard_grad_op", "fsdp"])
def test_a_layer_that_writes_to_its_sharded_weight_in_forward_is_refused(strategy: str) -> None:
    case = Case(parts=(Part(kind="clamped"),), plan={"strategy": strategy}, events=(step(),))
    found = outcome(case, num_ranks=2)
    assert found.kind == "refused"
    assert "parts.0.up.weight was written while it was gathered" in found.line


@pytest.mark.parametrize("graphs", [False, True])
def test_a_layer_that_writes_to_its_weight_in_forward_is_not_recomputed(graphs: bool) -> None:
    plan = {"strategy": "ddp", "units": "parts", "recompute": "full"}
    events = (step(), step(), step(retain=True))
    found = outcome(
        Case(parts=(Part(kind="clamped"),), plan=plan, events=events, double=True, graphs=graphs), num_ranks=2
    )
    assert found.kind == "refused"
    assert "writes into its parameters in forward" in found.line


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_embedding_with_max_norm_is_refused_before_training(strategy: str) -> None:
    case = Case(parts=(Part(kind="max_norm"),), plan={"strategy": strategy}, events=(step(),))
    found = outcome(case, num_ranks=2)
    assert (found.kind, found.at) == ("refused", -1)
    assert "max_norm" in found.line


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_forwards_of_batch_norm_before_a_backward_are_equal(strategy: str) -> None:
    case = Case(parts=(Part(kind="batch norm"),), plan={"strategy": strategy}, events=(step(forwards=2), step()))
    assert outcome(case, num_ranks=2).kind == "equal"


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_a_recomputed_unit_is_given_one_object_for_inputs_that_were_one(recompute: str) -> None:
    # nn.MultiheadAttention asks whether query, key and value are the same tensor.
    plan = {"strategy": "ddp", "units": "min-params:20", "recompute": recompute, "offload_activations": True}
    parts = (Part(kind="attention", frozen="all"), Part(kind="attention"))
    assert outcome(Case(parts=parts, plan=plan, events=(step(), step())), num_ranks=2).kind == "equal"


@pytest.mark.parametrize(
    ("num_ranks", "plan"),
    [(3, {"strategy": "zero1", "units": "leaf"}), (2, {"strategy": "shard_grad_op", "owned": ["*.weight"]})],
    ids=["slices", "owners"],
)
def test_a_frozen_parameter_with_a_gradient_is_refused_by_all_ranks(num_ranks: int, plan: dict[str, object]) -> None:
    frozen = Event(kind="freeze", settings={"part": 0, "how": "all"})
    events = (step(set_to_none=False), frozen, step(), step())
    parts = (Part(kind="square"), Part(kind="square"))
    found = outcome(Case(parts=parts, plan=plan, events=events, double=True), num_ranks=num_ranks)
    assert found.kind == "refused"
    assert "is frozen and still has a gradient" in found.line


def test_averages_are_resumed_where_what_was_frozen_later_is_frozen_from_the_start() -> None:
    frozen = Event(kind="freeze", settings={"part": 0, "how": "all"})
    reload = Event(kind="reload", settings={"how": "checkpoint", "plan": {"strategy": "zero1"}})
    events = (step(), frozen, Event(kind="start average"), step(), reload, step())
    case = Case(parts=(Part(kind="square"),), plan={"strategy": "fsdp"}, events=events)
    assert outcome(case, num_ranks=2).kind == "equal"


def test_a_plan_is_changed_after_a_model_was_extended() -> None:
    events = (
        step(),
        Event(kind="extend"),
        step(),
        Event(kind="replan", settings={"plan": {"strategy": "ddp"}}),
        step(),
    )
    case = Case(parts=(Part(kind="plain"),), plan={"strategy": "zero2"}, events=events)
    assert outcome(case, num_ranks=2).kind == "equal"


def test_most_cases_with_graphs_replay_some() -> None:
    drawn = [draw_case(seed, num_ranks=1) for seed in range(16)]
    cases = [with_graphs(case) for case in drawn if not case.graphs and not is_narrow(dict(case.plan))]
    found = [one for _, one in outcomes(cases, num_ranks=1)]
    assert {one.kind for one in found} <= {"equal", "refused"}
    assert sum(one.replayed > 0 for one in found) > len(found) / 2


# Cases that have failed, cut down, by what was wrong.
MENDED = {
    "two forwards of a partly frozen GRU": Case(
        parts=(Part(kind="recurrent", frozen="some"), Part(kind="recurrent")),
        plan={"strategy": "shard_grad_op"},
        events=(step(forwards=2),),
        double=True,
        seed=816,
    ),
    "two forwards of partly frozen leaves": Case(
        parts=(Part(kind="odd shapes", frozen="some"),),
        plan={"strategy": "fsdp", "units": "leaf", "offload_activations": False},
        events=(step(passes=2, forwards=2, clip="norm", set_to_none=False),),
        double=True,
        seed=1208,
    ),
    "a layer of an attention is a leaf that is not called, and one rank calls the attention": Case(
        parts=(Part(kind="attention", uses="sometimes", frozen="some"),),
        plan={"strategy": "fsdp", "units": "leaf"},
        events=(step(), step()),
        seed=1609,
    ),
    "parametrised leaves": Case(
        parts=(Part(kind="weight norm"), Part(kind="spectral norm")),
        plan={"strategy": "fsdp", "units": "leaf"},
        events=(step(), step()),
    ),
    "a training that diverges": Case(
        parts=(Part(kind="nested", uses="twice"),),
        plan={"strategy": "zero2"},
        events=(step(passes=3), step(clip="norm"), step(), step(), step()),
        double=True,
        seed=764,
    ),
    "buffers that each rank loads": Case(
        parts=(Part(kind="batch norm"),),
        plan={"strategy": "zero2"},
        events=(
            step(),
            Event(kind="write", settings={"how": "load_state_dict"}),
            Event(kind="evaluate", settings={"training": False}),
        ),
        double=True,
        seed=863,
    ),
    "a frozen parameter in one buffer with averaged ones is written": Case(
        parts=(Part(kind="square"), Part(kind="square")),
        plan={"strategy": "fsdp"},
        events=(
            Event(kind="freeze", settings={"how": "some", "part": 1}),
            Event(kind="start average"),
            Event(kind="write", settings={"how": "whole"}),
        ),
        seed=1023,
    ),
    "gradients of zeros are gone after a reload": Case(
        parts=(Part(kind="square"), Part(kind="square")),
        plan={"strategy": "zero2"},
        events=(
            step(set_to_none=False),
            Event(kind="reload", settings={"plan": {"strategy": "fsdp"}, "how": "full state"}),
            Event(kind="freeze", settings={"how": "all", "part": 1}),
            step(),
        ),
        seed=1452,
    ),
    "an input that is passed on by a layer that one rank calls": Case(
        parts=(Part(kind="keyed", uses="sometimes"), Part(kind="plain")),
        plan={"strategy": "fsdp", "units": "parts"},
        events=(step(), step()),
        seed=75,
    ),
    "state in Python where units are recomputed": Case(
        parts=tuple(Part(kind=kind) for kind in ("counting", "remembering", "queueing", "penalised")),
        plan={"strategy": "fsdp", "recompute": "full"},
        events=(step(forwards=2), step(retain=True), step()),
    ),
    "state in Python in a checkpoint of the user, offloaded and recomputed": Case(
        parts=(*(Part(kind=kind, checkpointed=True) for kind in ("remembering", "queueing", "spectral norm")),),
        plan={"strategy": "zero2", "recompute": "selective", "offload_activations": True, "units": "leaf"},
        events=(step(), step(), step()),
    ),
    "state in Python in a checkpoint of the user, with graphs": Case(
        parts=(Part(kind="remembering", checkpointed=True), Part(kind="plain"), Part(kind="queueing", hooked="look")),
        plan={"strategy": "fsdp", "units": "parts"},
        events=(step(), step(), step(), step()),
        double=True,
        graphs=True,
    ),
    "buffers in a checkpoint of the user, recomputed, with graphs": Case(
        parts=(Part(kind="spectral norm", checkpointed=True), Part(kind="plain")),
        plan={"strategy": "ddp", "units": "parts", "recompute": "selective"},
        events=(step(), step(), step(), step()),
        double=True,
        graphs=True,
    ),
    "two models in one backward, one of them frozen in part": Case(
        parts=(Part(kind="plain", frozen="some"), Part(kind="keyed")),
        plan={"strategy": "fsdp", "units": "parts"},
        events=tuple(Event(kind="together", settings={"how": how}) for how in ("critic", "teacher", "turns", "critic")),
        other_plan={"strategy": "zero2", "units": "parts"},
    ),
    "slices of a mesh with one shard are summed over passes in a narrow dtype": Case(
        parts=(Part(kind="square"),),
        plan={"strategy": "fsdp", "mesh": [2, 1], "across": "zero1", "reduce_dtype": "bf16"},
        events=(step(passes=3), step()),
        seed=320,
    ),
    "all ranks raise after a part that one of them calls": Case(
        parts=(Part(kind="square"), Part(kind="attribute", uses="sometimes")),
        plan={"strategy": "fsdp", "units": "parts"},
        events=(Event(kind="fail", settings={"where": "head", "part": 1}), step()),
        double=True,
        seed=686,
    ),
    "a rank that repeats its last batch": Case(
        parts=(Part(kind="counting"), Part(kind="remembering"), Part(kind="queueing", checkpointed=True)),
        plan={"strategy": "zero1"},
        events=(step(), Event(kind="join"), step()),
    ),
}


@pytest.mark.parametrize("what", MENDED)
def test_a_case_that_was_mended_stays_equal(what: str) -> None:
    found = outcome(MENDED[what], num_ranks=2)
    assert found.kind == "equal", found.line


@pytest.mark.parametrize("optimizer", ["adamw", "adamw fused"])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_a_frozen_parameter_whose_gradient_is_kept_is_stepped_or_refused(strategy: str, optimizer: str) -> None:
    events = (step(set_to_none=False), Event(kind="freeze", settings={"how": "all", "part": 1}), step(), step())
    parts = (Part(kind="square"), Part(kind="square"))
    found = outcome(Case(parts=parts, plan={"strategy": strategy}, events=events, optimizer=optimizer), num_ranks=2)
    assert found.kind == ("refused" if strategy == "zero2" else "equal"), found.line


def test_a_failing_case_is_cut_down_to_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    import outcomes as module

    def fails_with_two_passes(case: Case, *, num_ranks: int) -> module.Outcome:
        failed = any(event.settings.get("passes") == 2 for event in case.events)
        return module.Outcome(kind="failed" if failed else "equal", line="differs")

    monkeypatch.setattr(module, "outcome", fails_with_two_passes)
    parts = tuple(Part(kind=kind) for kind in PARTS)
    case = Case(parts=parts, plan={"strategy": "fsdp", "prefetch": 3}, events=(step(), step(passes=2, clip="value")))
    small, _ = cut_down(case, num_ranks=2, most=500)
    assert small.events == (step(passes=2),)
    assert (len(small.parts), dict(small.plan)) == (1, {"strategy": "fsdp"})
