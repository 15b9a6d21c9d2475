"""When graphs make way."""

from shardwise.engine.graphs.balance import Balance


def test_recordings_are_repaid_by_replays() -> None:
    balance = Balance()
    recordings = 0
    while balance.pays:
        balance.note_recording()
        recordings += 1
    balance.note_replay()
    assert balance.pays
    assert recordings > 10


def test_graphs_that_owe_replays_make_later_ones_wait() -> None:
    balance = Balance()
    balance.note_recording()
    for _ in range(10):
        balance.note_replay()
    balance.note_drop()
    assert balance.patience == 1
    balance.note_recording()
    balance.note_drop()
    assert balance.patience > 1
    assert balance.pays


def test_a_form_needs_all_memory_once_it_has_taken_more_than_passes_without_graphs() -> None:
    balance = Balance()
    for form, reserved, holds_graphs in (("a", 100, False), ("b", 104, True), ("c", 106, True)):
        balance.note_ordinary(form, reserved, holds_graphs=holds_graphs)
    assert [form for form in "abc" if balance.needs_all(form)] == ["c"]
