"""A key is described once: its check, its error, its row in the docs and its place in a file follow from that."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields

import pytest

from shardwise.base.errors import InvalidPlan
from shardwise.base.files.form import WrongForm
from shardwise.base.files.keys import check_keys, documented, forms_of, key, object_of, reference, to_table
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh, Placement
from shardwise.training.config.config import SECTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    size: int = key(..., "its width", least=1)


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class Car:
    """A car."""

    name: str = key(..., "what it is called")
    colour: str | None = key(None, "its paint", choices=("red", "blue"))
    spare: Wheel | None = key(None, "a fifth wheel")
    wheels: Sequence[Wheel] = key((), "the others")
    speeds: Mapping[str, float] = key(dict, "road → speed", above=0)
    doors: int = 4

    def __post_init__(self) -> None:
        check_keys(self, path="car", error=InvalidPlan)


def test_an_object_is_made_of_its_table_and_written_as_one() -> None:
    table = {"name": "a", "wheels": [{"size": 3}], "spare": {"size": 4}, "speeds": {"dirt": 9}}
    car = object_of(Car)(table, "")
    assert car == Car(name="a", wheels=[Wheel(size=3)], spare=Wheel(size=4), speeds={"dirt": 9.0})
    assert object_of(Car)(car, "") is car
    assert to_table(Car(name="a", spare=Wheel(size=4))) == {
        "name": "a",
        "wheels": [],
        "spare": {"size": 4},
        "speeds": {},
    }


def test_a_mistake_names_its_path_and_what_is_missing() -> None:
    with pytest.raises(WrongForm, match="name is missing: what it is called"):
        object_of(Car)({}, "")
    with pytest.raises(WrongForm, match="unknown key 'doors'"):
        object_of(Car)({"name": "a", "doors": 5}, "")
    with pytest.raises(InvalidPlan, match="car.spare = 3: must be a Wheel, or a table of size"):
        Car(name="a", spare=3)  # type: ignore[arg-type]
    with pytest.raises(InvalidPlan, match="car.colour = 'pink': must be one of red, blue"):
        Car(name="a", colour="pink")


def test_the_reference_and_the_docstring_say_the_same() -> None:
    assert reference(Car) == [
        ("name", "required", "what it is called"),
        ("colour", "–", "its paint; one of red, blue"),
        ("spare", "–", "a fifth wheel; a Wheel, or a table of size"),
        ("wheels", "–", "the others; a list"),
        ("speeds", "–", "road → speed; a table"),
    ]
    assert (Car.__doc__ or "").splitlines()[:4] == [
        "A car.",
        "",
        "    name     what it is called",
        "    colour   its paint; one of red, blue",
    ]


@pytest.mark.parametrize("kind", [Plan, Mesh, Placement, *SECTIONS.values()], ids=lambda kind: kind.__name__)
def test_a_default_has_its_form(kind: type) -> None:
    """`check_keys` leaves defaults alone."""
    forms = forms_of(kind)
    for item in fields(kind):
        if item.default is not MISSING:
            assert forms[item.name](item.default, "") == item.default
