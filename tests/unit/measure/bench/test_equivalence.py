"""The gate: what rounding explains passes, and what it does not is named."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from shardwise.measure.bench.case_result import CaseResult
from shardwise.measure.bench.equivalence import compare

# As a small GPT has them: a bias is a thousandth of the whole, and the key's bias is noise.
NORMS = {"head.weight": 2.0, "blocks.0.attn.qkv.weight": 0.5, "blocks.0.attn.qkv.bias": 2e-3, "key.bias": 1e-9}
WHOLE = math.hypot(*NORMS.values())
FP32 = 2.0**-24
DTYPES = dict.fromkeys(("compute", "master", "grads", "optim"), ("float32",))


def case(strategy: str, *, engine: str = "shardwise", **changes: Any) -> CaseResult:
    values: dict[str, Any] = {
        "losses": tuple(5.5 - 0.1 * step for step in range(20)),
        "grad_norms": (WHOLE, WHOLE, WHOLE),
        "param_norms": dict(NORMS),
        "dtypes": dict(DTYPES),
    }
    if "param_norms" in changes and "grad_norms" not in changes:
        whole = math.hypot(*changes["param_norms"].values())
        values["grad_norms"] = (whole,)
    return CaseResult(engine=engine, strategy=strategy, **{**values, **changes})


def scaled(name: str, factor: float) -> Mapping[str, float]:
    return {**NORMS, name: NORMS[name] * factor}


OTHERS = (case("ddp"), case("zero1"), case("fsdp"))


def texts(*cases: CaseResult, precision: str = "fp32") -> list[str]:
    return [difference.text for difference in compare(cases, precision=precision).differences]


def test_equal_cases_agree_with_nothing_between_them() -> None:
    found = compare(OTHERS, precision="fp32")
    assert found.agrees
    assert found.largest == 0.0


@pytest.mark.parametrize("name", ["head.weight", "blocks.0.attn.qkv.weight", "blocks.0.attn.qkv.bias"])
@pytest.mark.parametrize("factor", [4 / 3, 3 / 4, 2 / 1, 1024 / 1023])
def test_one_gradient_divided_by_the_wrong_number_is_found_even_of_a_bias(name: str, factor: float) -> None:
    wrong = case("zero2", param_norms=scaled(name, factor))
    (difference,) = compare((*OTHERS, wrong), precision="fp32").differences
    assert difference.case == "zero2"
    assert difference.excess > 1
    assert name in difference.text


def test_the_line_says_which_case_what_and_by_how_much() -> None:
    wrong = case("zero2", param_norms=scaled("blocks.0.attn.qkv.weight", 4 / 3))
    assert texts(*OTHERS, wrong) == [
        "zero2: the gradient of blocks.0.attn.qkv.weight in step 1 is 1.333 times that of the others (0.6666667, 0.5)"
    ]


@pytest.mark.parametrize("position", range(4))
def test_the_odd_one_out_is_named_wherever_it_stands(position: int) -> None:
    cases = list(OTHERS)
    cases.insert(position, case("zero2", param_norms=scaled("head.weight", 0.75)))
    assert {difference.case for difference in compare(cases, precision="fp32").differences} == {"zero2"}


def test_of_two_that_differ_the_line_names_both() -> None:
    wrong = case("fsdp", engine="torch", param_norms=scaled("head.weight", 2.0))
    (text,) = texts(case("ddp"), wrong)
    assert text.startswith("torch fsdp: ")
    assert "2 times that of ddp" in text


def test_a_gradient_that_is_truly_zero_may_be_any_noise() -> None:
    assert compare((*OTHERS, case("zero2", param_norms=scaled("key.bias", 50.0))), precision="fp32").agrees
    assert not compare((*OTHERS, case("zero2", param_norms=scaled("key.bias", 1e4))), precision="fp32").agrees


def test_after_clipping_the_gradient_that_is_wrong_is_named_and_not_those_that_it_shrinks() -> None:
    clipped = [replace(one, param_norms={name: norm / WHOLE for name, norm in NORMS.items()}) for one in OTHERS]
    wrong = scaled("head.weight", 4 / 3)
    whole = math.hypot(*wrong.values())
    # Both are cut to the same length, and head.weight is nearly all of it.
    spoilt = case("zero2", grad_norms=(whole,), param_norms={name: norm / whole for name, norm in wrong.items()})
    (text,) = texts(*clipped, spoilt)
    assert text.startswith("zero2: the gradient of head.weight in step 1 is 1.333 times that of the others")
    assert "more" not in text


def test_gradients_that_are_all_wrong_after_clipping_are_found() -> None:
    (text,) = texts(*OTHERS, case("zero2", grad_norms=(WHOLE,), param_norms={n: norm / 2 for n, norm in NORMS.items()}))
    assert text.startswith("zero2: the norm of the gradient that the optimizer gets in step 1 is 0.5 times")


def test_many_wrong_gradients_are_one_line_with_the_worst() -> None:
    wrong = case("zero2", param_norms={name: norm * 4 / 3 for name, norm in NORMS.items()})
    (text,) = texts(*OTHERS, wrong)
    assert text.endswith("(and of 2 more)")


def test_a_missing_or_an_extra_gradient_is_a_difference() -> None:
    lacks = case("zero2", param_norms={name: norm for name, norm in NORMS.items() if name != "head.weight"})
    extra = case("fsdp", engine="torch", param_norms={**NORMS, "module.head": 1.0})
    assert texts(*OTHERS, lacks, extra) == [
        "zero2: there is no gradient of head.weight in step 1, unlike in the others",
        "torch fsdp: there is a gradient of module.head in step 1, unlike in the others",
    ]


@pytest.mark.parametrize("kind", ["compute", "master", "grads", "optim"])
def test_unequal_dtypes_are_a_difference(kind: str) -> None:
    wrong = case("zero2", dtypes={**DTYPES, kind: ("bfloat16",)})
    assert texts(*OTHERS, wrong) == [f"zero2: the dtype of {kind} is bfloat16, and float32 in the others"]


def test_dtypes_that_an_engine_does_not_tell_are_no_difference() -> None:
    assert texts(*OTHERS, case("fsdp", engine="lightning", dtypes={"compute": ("float32",)})) == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("field", ["losses", "grad_norms", "param_norms"])
def test_what_is_not_a_number_is_a_difference_even_if_all_have_it(field: str, value: float) -> None:
    good = getattr(OTHERS[0], field)
    bad: Any = {**good, "head.weight": value} if isinstance(good, Mapping) else (good[0], value, *good[2:])
    wrong = replace(OTHERS[0], strategy="zero2", **{field: bad})
    assert {difference.case for difference in compare((*OTHERS, wrong), precision="fp32").differences} == {"zero2"}
    assert not compare((wrong, replace(wrong, strategy="zero1")), precision="fp32").agrees


class TestDrift:
    """Losses part slowly; what parts at once, or far, is another training."""

    def drifted(self, first: float) -> CaseResult:
        """The losses of the others, off by `first` in step 1 and by twice as much in each that follows."""
        losses = [loss * (1 + first * 2**step * (-1) ** step) for step, loss in enumerate(OTHERS[0].losses)]
        return case("zero2", losses=tuple(losses))

    def test_a_drift_that_grows_from_rounding_passes(self) -> None:
        found = compare((*OTHERS, self.drifted(8 * FP32)), precision="fp32")
        assert found.agrees
        assert 0.1 < found.largest < 1

    def test_a_drift_beyond_that_is_told_with_its_first_step(self) -> None:
        (text,) = texts(*OTHERS, case("zero2", losses=(5.5, 5.4 * 1.001, *OTHERS[0].losses[2:])))
        assert text == "zero2: the loss of step 2 is not that of the others (5.4054, 5.4)"

    def test_the_first_loss_may_differ_by_rounding_only(self) -> None:
        losses = (5.5 * (1 + 1e-5), *OTHERS[0].losses[1:])
        (text,) = texts(*OTHERS, case("zero2", losses=losses))
        assert "the loss of step 1" in text

    def test_the_common_steps_are_compared(self) -> None:
        assert texts(*OTHERS, case("zero2", losses=OTHERS[0].losses[:7])) == []

    def test_steps_that_have_parted_are_compared_by_their_mean(self) -> None:
        losses = tuple(5.5 - 0.01 * step for step in range(100))
        noisy = tuple(loss + (0.5 * (-1) ** step if step >= 16 else 0.0) for step, loss in enumerate(losses))
        same = [case("ddp", losses=losses), case("zero1", losses=losses)]
        assert texts(*same, case("zero2", losses=noisy)) == []
        worse = tuple(loss + (0.5 if step >= 16 else 0.0) for step, loss in enumerate(losses))
        (text,) = texts(*same, case("zero2", losses=worse))
        assert text.startswith("zero2: the mean loss of steps 17 to 100 is 1.1")

    def test_no_step_is_so_late_that_it_may_be_no_number(self) -> None:
        losses = tuple(5.5 for _ in range(2000))
        (text,) = texts(case("ddp", losses=losses), case("zero2", losses=(*losses[:40], math.nan, *losses[41:])))
        assert text == "zero2: the loss of step 41 is nan, that of ddp 5.5"

    def test_a_loss_that_has_fallen_to_nothing_is_not_compared_with_itself(self) -> None:
        losses = (5.5, 1e-7)
        assert texts(case("ddp", losses=losses), case("zero1", losses=(5.5, 2e-7))) == []


class TestHalfPrecision:
    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_a_unit_roundoff_passes_and_a_wrong_divisor_does_not(self, precision: str) -> None:
        unit = {"bf16": 2.0**-8, "fp16": 2.0**-11}[precision]
        near = case("fsdp", engine="torch", param_norms={name: norm * (1 + 2 * unit) for name, norm in NORMS.items()})
        assert texts(*OTHERS, near, precision=precision) == []
        wrong = case("zero2", param_norms=scaled("blocks.0.attn.qkv.weight", 8 / 7))
        assert len(texts(*OTHERS, wrong, precision=precision)) == 1

    def test_a_step_that_the_scaler_leaves_out_is_no_difference_in_fp16_alone(self) -> None:
        skipped = [replace(one, grad_norms=(math.inf, WHOLE), param_norms={}) for one in OTHERS]
        assert texts(*skipped, precision="fp16") == []
        assert len(texts(*skipped, precision="fp32")) == 3
        assert len(texts(*skipped, replace(OTHERS[0], param_norms={}), precision="fp16")) == 1

    def test_native_is_as_coarse_as_what_products_were_seen_in(self) -> None:
        half = {**DTYPES, "compute": ("bfloat16",)}
        cases = [
            case("ddp", dtypes=half),
            case("fsdp", dtypes=half, param_norms={name: norm * 1.01 for name, norm in NORMS.items()}),
        ]
        assert texts(*cases, precision="native") == []
        assert len(texts(*(replace(one, dtypes=DTYPES) for one in cases), precision="native")) == 1


def test_a_case_that_did_not_run_is_not_compared() -> None:
    assert texts(*OTHERS, CaseResult(engine="lightning", strategy="zero1", why_not="lightning has no zero1")) == []
    assert compare((), precision="fp32").agrees
