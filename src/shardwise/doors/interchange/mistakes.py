"""The mistakes that a setup can have, by code. docs/doctor.md explains each code."""

from dataclasses import dataclass

TITLES = {
    "SW101": "nothing is wrapped",
    "SW102": "keys of FSDP version 1 and 2 are mixed",
    "SW103": "the optimizer updates weights in 16 bits",
    "SW104": "the batch does not fit",
    "SW105": "sharded, where replicas fit and are faster",
    "SW106": "accumulation still synchronises in every pass",
    "SW107": "tied weights are split",
    "SW108": "ranks get uneven or the same batches",
    "SW109": "the step is bound by the host",
    "SW110": "fp16 with a fixed loss scale",
    "SW111": "offloaded, where it fits without",
    "SW112": "the job's sizes contradict each other",
    "SW113": "activations are recomputed twice",
    "SW114": "an unknown key",
    "SW115": "a value that the tool cannot take",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """`line` says what is wrong, with numbers; `fix` says what to write instead."""

    code: str
    line: str
    fix: str

    def __str__(self) -> str:
        return f"{self.code} {TITLES[self.code]}: {self.line}; {self.fix} (docs/doctor.md#{self.code.lower()})"
