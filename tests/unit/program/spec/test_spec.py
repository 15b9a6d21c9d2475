import subprocess
import sys

import pytest

from shardwise.base.errors import InvalidModel
from shardwise.program.spec import ROOT, ModelSpec, TensorSpec, UnitSpec

weight = TensorSpec(name="a.weight", shape=(3, 5))


def test_bytes_follow_from_shape_and_dtype() -> None:
    assert weight.num_bytes == 60
    assert TensorSpec(name="scalar", shape=(), dtype="bfloat16").num_bytes == 2
    assert TensorSpec(name="empty", shape=(0, 7)).num_bytes == 0


def test_a_model_adds_up_its_units() -> None:
    root = UnitSpec(name=ROOT, class_name="Net", params=(TensorSpec(name="b", shape=(7,), dtype="float64"),))
    model = ModelSpec(
        name="net",
        units=(root, UnitSpec(name="a", class_name="Linear", params=(weight,))),
        call_order=(ROOT, "a", "a"),
    )
    assert model.num_params == 22
    assert sum(param.num_bytes for unit in model.units for param in unit.params) == 116
    assert model.unit("a").params == (weight,)


@pytest.mark.parametrize(
    ("units", "order", "message"),
    [
        ((), (), "the first unit must be"),
        ((UnitSpec(name="a", class_name="A"),), (), "the first unit must be"),
        ((UnitSpec(name=ROOT, class_name="A"),) * 2, (), "two units have one name"),
        (
            (
                UnitSpec(name=ROOT, class_name="A", params=(weight,)),
                UnitSpec(name="a", class_name="A", params=(weight,)),
            ),
            (),
            "a.weight is in two units",
        ),
        ((UnitSpec(name=ROOT, class_name="A"),), ("b",), "names b, which is no unit"),
    ],
)
def test_a_model_that_contradicts_itself_is_refused(
    units: tuple[UnitSpec, ...], order: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InvalidModel, match=message):
        ModelSpec(name="net", units=units, call_order=order)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(InvalidModel, match="quint8"):
        TensorSpec(name="x", shape=(1,), dtype="quint8")


def test_specs_import_no_torch() -> None:
    code = "import sys, shardwise.program.spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
