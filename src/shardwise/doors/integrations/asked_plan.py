"""The plan that a framework's user asks for, checked against the framework's own settings."""

from shardwise.base.errors import InvalidPlan
from shardwise.plan import Plan, as_plan
from shardwise.plan.limits import LIMITS

_PRECISIONS = {"no": "fp32", "32-true": "fp32", "bf16": "bf16", "bf16-mixed": "bf16"}


def asked_plan(plan: Plan | str, *, said: str, setting: str, accumulate: int | None = None) -> Plan:
    """Return `plan`, or the plan of the strategy of that name in the framework's precision.

    said         the framework's precision, which it was given in `setting` (as a user would write it)
    accumulate   passes per update, if the framework was given them
    """
    if said not in _PRECISIONS:
        raise InvalidPlan(f"{setting}: Shardwise computes in fp32 or bf16 here; use bf16, or Plan(precision=…)")
    precision = _PRECISIONS[said]
    if isinstance(plan, str):
        return Plan(strategy=plan, precision=precision)
    plan = as_plan(plan)
    LIMITS[plan.engine].check_call("integrations", plan)
    computes_so = plan.precision == precision or (plan.has_fp8 and precision == "bf16")
    if precision != "fp32" and not computes_so:
        raise InvalidPlan(f"{setting} with plan.precision = {plan.precision!r}: say {precision!r} in the plan as well")
    if plan.precision == "fp16":
        raise InvalidPlan(
            "plan.precision = 'fp16' needs shardwise.GradScaler, which frameworks do not call: use 'bf16'"
        )
    if plan.accumulate not in (1, accumulate):
        said = "its own setting" if accumulate is None else f"its own setting, which is {accumulate}"
        raise InvalidPlan(f"plan.accumulate = {plan.accumulate}: the framework accumulates by {said}; leave it out")
    return plan
