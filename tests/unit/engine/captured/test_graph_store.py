"""Which graphs are kept, and when a key gets another or is given up."""

from typing import Any

import torch

from shardwise.engine.captured.graph_store import GraphStore, KeyHistory
from shardwise.engine.captured.replayed_grads import gradient_distance, is_compared, most_distance


class Graph:
    alive = True

    def release(self) -> None:
        self.alive = False


def store_of(*names: str, limit: int = 3) -> tuple[GraphStore[Graph], dict[str, KeyHistory[Graph]]]:
    store: GraphStore[Graph] = GraphStore(limit=limit)
    found: dict[str, KeyHistory[Graph]] = {}
    for name in names:
        key: Any = name
        found[name] = store.find(key)
        store.add(found[name], reads=(), graph=Graph())
    return store, found


def test_the_least_recently_used_graph_is_evicted_and_released() -> None:
    store, found = store_of("a", "b", "c")
    first = {name: history.graphs[0] for name, history in found.items()}
    store.use(found["a"], first["a"])
    store.add(store.find("d"), reads=(), graph=Graph())  # type: ignore[arg-type]
    assert [graph.graph.alive for graph in first.values()] == [True, False, True]
    assert not found["b"].graphs
    assert store.num_graphs == 3


def test_numbers_count_captures_and_are_not_used_again() -> None:
    store, _ = store_of("a", "b")
    store.clear()
    assert store.num_graphs == 0
    again = store.add(store.find("a"), reads=(), graph=Graph())  # type: ignore[arg-type]
    assert again.number == 2


def test_the_graph_that_was_right_last_is_tried_first() -> None:
    store, found = store_of("a")
    old = found["a"].graphs[0]
    new = store.add(found["a"], reads=(), graph=Graph())
    assert found["a"].graphs == [new, old]
    store.use(found["a"], old)
    assert found["a"].graphs == [old, new]


def test_values_get_a_graph_of_their_own_when_they_come_in_more_than_a_twentieth_of_the_steps() -> None:
    history: KeyHistory[Graph] = KeyHistory(key=None)  # type: ignore[arg-type]
    history.num_captured, history.num_unfit = 5, 1
    assert not history.wants_another()
    history.num_unfit = 2
    assert history.wants_another()
    history.num_captured = 100
    assert not history.wants_another()


def test_a_key_is_given_up_when_its_graphs_keep_failing() -> None:
    history: KeyHistory[Graph] = KeyHistory(key=None)  # type: ignore[arg-type]
    history.num_captured = 40
    assert history.why_not() == ""
    history.num_wasted = 11
    assert history.why_not() == "11 of 40 replays were thrown away"


def test_keys_that_are_seen_once_do_not_pile_up() -> None:
    store: GraphStore[Graph] = GraphStore(limit=2)
    for number in range(100):
        store.find(number)  # type: ignore[arg-type]
    assert len(store.histories) <= 9


def test_replays_1_10_100_are_compared() -> None:
    assert [number for number in range(1, 2000) if is_compared(number)] == [1, 10, 100, 1000]


def test_the_distance_of_gradients_is_a_share_of_their_norm() -> None:
    ones = torch.ones(100)
    assert gradient_distance([ones, None], [ones, None]) == 0.0
    assert abs(gradient_distance([1.01 * ones], [ones]) - 0.01) < 1e-5
    assert gradient_distance([ones], [None]) == float("inf")
    assert gradient_distance([ones], [ones * float("nan")]) == 0.0
    assert most_distance([torch.float32]) < most_distance([torch.float32, torch.bfloat16])
