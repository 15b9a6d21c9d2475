"""The ledger: from allocations and marks to live bytes by category, with numbers that can be checked by hand."""

from shardwise.measure.profile.memory_ledger import (
    Allocation,
    Lasts,
    LedgerEntry,
    LedgerMark,
    MemoryLedger,
    OperationMark,
    ledger_of,
    paired,
)

# Rows begin at 10, 20 and 30; the third is the update. The step is over at 40.
FORWARD, BACKWARD, UPDATE, END = 10, 20, 30, 40


def marks(*known: dict[int, str]) -> list[LedgerMark]:
    names = zip(("forward", "backward", "update"), (FORWARD, BACKWARD, UPDATE), known, strict=True)
    return [LedgerMark(label=label, moment=at, known=what, computes=label != "update") for label, at, what in names]


def ledger(*allocations: Allocation, known: tuple[dict[int, str], ...] = ({}, {}, {})) -> MemoryLedger:
    return ledger_of(allocations, marks=marks(*known), end=END)


def held(entry: LedgerEntry) -> dict[str, int]:
    return {name: num_bytes for name, num_bytes in entry.num_bytes.items() if num_bytes}


def test_a_row_shows_its_highest_moment() -> None:
    found = ledger(
        Allocation(address=1, num_bytes=100, born=11, freed=25),
        Allocation(address=2, num_bytes=50, born=12, freed=13),
        Allocation(address=3, num_bytes=20, born=14, freed=15),
    )
    assert [entry.at for entry in found.entries] == ["forward", "backward", "update"]
    assert [held(entry) for entry in found.entries] == [{"activations": 150}, {"activations": 100}, {}]
    assert found.peak is found.entries[0]
    assert held(found.at_rest) == {}


def test_what_is_there_before_the_step_counts_in_every_row() -> None:
    found = ledger(Allocation(address=1, num_bytes=8, born=3), known=({1: "params"}, {1: "params"}, {1: "params"}))
    assert [held(entry) for entry in (*found.entries, found.at_rest)] == [{"params": 8}] * 4


def test_the_engine_says_what_a_storage_is_and_later_that_it_is_something_else() -> None:
    found = ledger(Allocation(address=1, num_bytes=8, born=5), known=({1: "reduce"}, {1: "reduce"}, {1: "grads"}))
    assert [held(entry) for entry in found.entries] == [{"reduce": 8}, {"reduce": 8}, {"reduce": 8}]
    # Of several moments as high a row shows the first; after it the storage is a gradient.
    assert held(found.at_rest) == {"grads": 8}


def test_a_gradient_is_one_from_birth_though_the_engine_sees_it_later() -> None:
    found = ledger(Allocation(address=1, num_bytes=8, born=15, freed=25), known=({}, {1: "reduce"}, {}))
    assert held(found.entries[0]) == {"reduce": 8}


def test_an_address_that_is_given_out_again_is_another_storage() -> None:
    first = Allocation(address=1, num_bytes=8, born=11, freed=15)
    second = Allocation(address=1, num_bytes=4, born=16, freed=35)
    found = ledger(first, second, known=({}, {1: "gathered"}, {1: "gathered"}))
    assert held(found.entries[0]) == {"activations": 8}
    assert held(found.entries[1]) == {"gathered": 4}


def test_what_nobody_knows_is_other_in_the_update_before_the_step_and_as_scratch() -> None:
    found = ledger(
        Allocation(address=1, num_bytes=1, born=5),
        Allocation(address=2, num_bytes=2, born=31, freed=32),
        Allocation(address=3, num_bytes=4, born=12, freed=13, is_scratch=True),
    )
    assert [held(entry) for entry in found.entries] == [{"other": 5}, {"other": 1}, {"other": 3}]


def test_an_operation_shows_what_is_live_after_it_and_a_computation_its_highest_moment() -> None:
    """A gather at 11, a forward from 13 on, a free at 17, and an update between 31 and 35."""
    allocations = [
        Allocation(address=1, num_bytes=100, born=10, freed=16),
        Allocation(address=2, num_bytes=7, born=14, freed=15),
        Allocation(address=3, num_bytes=50, born=14),
        Allocation(address=4, num_bytes=30, born=33, freed=34),
    ]
    operations = [
        OperationMark(label="gather", moment=11, lasts=Lasts.NOT),
        OperationMark(label="forward", moment=13, lasts=Lasts.UNTIL_NEXT),
        OperationMark(label="free", moment=17, lasts=Lasts.NOT),
        OperationMark(label="wait", moment=31, lasts=Lasts.NOT),
        OperationMark(label="update", moment=35, lasts=Lasts.SINCE_LAST),
    ]
    known = ({1: "gathered"}, {}, {})
    found = ledger_of(allocations, marks=marks(*known), end=END, operations=operations)
    sums = {entry.at: entry.total_bytes for entry in found.operations}
    assert sums == {"gather": 100, "forward": 157, "free": 50, "wait": 50, "update": 80}
    assert [entry.total_bytes for entry in found.entries] == [157, 50, 80], "rows do not depend on operations"
    assert MemoryLedger.from_data(found.to_data()) == found


def test_a_computation_ends_where_the_row_of_the_next_operation_begins() -> None:
    """A gather at 23, in the row that begins at 20, has its memory from 21 on."""
    operations = [
        OperationMark(label="forward", moment=11, lasts=Lasts.UNTIL_NEXT),
        OperationMark(label="gather", moment=23, lasts=Lasts.NOT),
    ]
    allocations = [
        Allocation(address=1, num_bytes=5, born=12, freed=13),
        Allocation(address=2, num_bytes=100, born=21, freed=35),
    ]
    found = ledger_of(allocations, marks=marks({}, {}, {}), end=END, operations=operations)
    assert [entry.total_bytes for entry in found.operations] == [5, 100]


def test_a_ledger_survives_json() -> None:
    found = ledger(Allocation(address=1, num_bytes=8, born=11, freed=35))
    assert MemoryLedger.from_data(found.to_data()) == found
    old = {name: value for name, value in found.to_data().items() if name != "operations"}
    assert MemoryLedger.from_data(old) == found


def test_rows_of_one_name_are_laid_beside_each_other_in_order() -> None:
    """Under accumulation a row comes several times; of those that were not seen, the highest counts with the one before."""
    expected = [
        LedgerEntry(at=at, num_bytes={"params": size})
        for at, size in (("a", 1), ("b", 9), ("b", 2), ("a", 3), ("c", 4))
    ]
    seen = [LedgerEntry(at=at, num_bytes={}) for at in ("a", "a", "c", "d")]
    found = [(one.at, other and other.total_bytes) for one, other in paired(seen, expected)]
    assert found == [("a", 9), ("a", 3), ("c", 4), ("d", None)]
