"""The policy by which a model is cut into units, as a value, and its spelling in a plan.

    auto                      the outermost repeated blocks of ModuleList and Sequential stacks; where that leaves
                              most of the model at the root, the large layers of its stacks as well; and large
                              embeddings and heads that share their weights with no other module
    blocks                    the same without embeddings and heads
    class:Block,Bottleneck    every module of these classes
    min-params:1000000        the smallest modules that hold at least so many parameters
    leaf                      every module that holds parameters of its own
    none                      the whole model is one unit
    auto + head + embed       any of these, and the named modules as units of their own

Modules that no unit covers stay at the root, which is always a unit. units/unit_modules.py applies the policy.
"""

from dataclasses import dataclass
from enum import Enum

from shardwise.errors import InvalidPlan
from shardwise.files.form import Form, string


class Cut(Enum):
    """The rule by which modules become units; the value is its spelling."""

    AUTO = "auto"
    BLOCKS = "blocks"
    CLASSES = "class"
    MIN_PARAMS = "min-params"
    LEAVES = "leaf"
    NOTHING = "none"


_SPELLINGS = "auto, blocks, class:NAME,…, min-params:N, leaf, none (each may be followed by + MODULE …)"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPolicy:
    """A rule, its argument, and modules that are units in addition to those of the rule."""

    cut: Cut = Cut.AUTO
    class_names: tuple[str, ...] = ()
    min_params: int = 0
    modules: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "UnitPolicy":
        """Return the policy that `text` spells."""
        rule, *modules = (part.strip() for part in text.split("+"))
        word, colon, argument = (part.strip() for part in rule.partition(":"))
        cut = next((cut for cut in Cut if cut.value == word), None)
        takes_argument = cut in (Cut.CLASSES, Cut.MIN_PARAMS)
        printable = all(module.isprintable() and module for module in modules)
        if cut is None or bool(colon) != takes_argument or not printable:
            raise InvalidPlan(f"units = {text!r}: must be one of {_SPELLINGS}")
        if cut is Cut.MIN_PARAMS:
            return cls(cut=cut, min_params=_parse_count(argument, text=text), modules=tuple(modules))
        class_names = tuple(name.strip() for name in argument.split(",")) if cut is Cut.CLASSES else ()
        for name in class_names:
            if not name.isidentifier():
                raise InvalidPlan(f"units = {text!r}: {name!r} is not a class name")
        return cls(cut=cut, class_names=class_names, modules=tuple(modules))

    def __str__(self) -> str:
        rule = self.cut.value
        if self.cut is Cut.CLASSES:
            rule += ":" + ",".join(self.class_names)
        elif self.cut is Cut.MIN_PARAMS:
            rule += f":{self.min_params}"
        return " + ".join((rule, *self.modules))


AUTO_UNITS = str(UnitPolicy())
"""The usual cut, for which specs come with the package."""

POLICY = Form(words=f"one of {_SPELLINGS}", fits=string.fits, read=lambda value, path: str(UnitPolicy.parse(value)))
"""The form of `units` in a plan. Two spellings of one policy become the same, so that equal plans are equal values."""


def _parse_count(argument: str, *, text: str) -> int:
    digits = argument.replace("_", "")
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 18 or int(digits) < 1:
        raise InvalidPlan(f"units = {text!r}: min-params takes a whole number of at least 1")
    return int(digits)
