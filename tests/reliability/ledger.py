"""Every way that was found to get a wrong result without being told, in the page's order.

A test is tied to a case by `@pytest.mark.ledger("case-id", outcome=…)`; a case may have several tests. Outcomes:

right      the result is the one of a single process; of files: nothing is lost
refused    one line that names the way out, and nothing was changed
warned     training continues as asked, and one line says what is unusual
"""

from dataclasses import dataclass

import pytest

OUTCOMES = ("right", "refused", "warned")


# Of each list: case → what a user does, as Markdown.
LISTS: dict[str, dict[str, str]] = {
    "Ordinary training code": {
        "optimizer-state-saved": "every rank calls `optimizer.state_dict()`, rank 0 saves it, all ranks load it",
        "optimizer-state-by-number": "`load_full_state_dict` is given torch's own optimizer state (integer keys)",
        "optimizer-state-of-others": "`load_full_state_dict` is given names that do not exist",
        "method-other-than-forward": "trains through `model.training_step(x)` instead of `model(x)`",
        "penalty-first": "runs the backward of a penalty on the weights, then the loss's",
        "penalty-later": "runs the backward of a penalty on the weights after the loss's",
        "parameters-added": "adds parameters after `prepare`: a new head, a late LoRA, resized embeddings",
        "write-slices": "writes into the slices in `optimizer.param_groups`",
        "write-bf16": "writes into the module's parameters in bf16",
        "clip-by-torch-in-bf16": "calls torch's `clip_grad_norm_` in bf16",
        "optimizer-cautious": "uses Lion with `caution=True`",
        "optimizer-subclass": "uses LARS as a subclass of SGD",
        "optimizer-8bit": "uses another package's 8-bit `AdamW`",
        "write-schedule-free": "calls `.eval()` of a schedule-free optimizer",
        "write-ema": "copies an average (EMA) of slices back",
        "shared-encoder": "prepares two models that share an encoder",
        "accelerate-loop": "gives a prepared model to `Accelerator.prepare`",
        "accelerate-optimizer": "gives `ShardwiseAccelerator.prepare` a model and the optimizer of another one",
        "nf4-state": "prepares a bitsandbytes NF4 model on ranks with different seeds",
        "same-data": "reads the same seeded loader on every rank, without a sampler",
        "grad-scaler-of-torch": "uses torch's `GradScaler`, and one rank alone finds an overflow",
        "model-of-dtensors": "prepares a model with DTensors: `fully_shard`, tensor parallel",
        "model-of-tensor-subclasses": "prepares a model with other wrapper tensors, as torchao's",
    },
    "Found by attacking it": {
        "task-past-forward": "runs `shardwise train` with a loss that calls `model.training_step(batch)`",
        "write-bf16-init": "calls `nn.init` or `p.mul_` in bf16 after `prepare`",
        "write-bf16-submodule": "calls `model.sub.load_state_dict(pretrained)` in bf16",
        "late-param-group": "calls `optimizer.add_param_group` after `prepare`",
        "write-gradient": "writes `p.grad = p.grad * c` under `zero1`",
        "lock-is-a-link": "a `.lock` is a link to a file elsewhere",
        "saving-is-a-link": "`checkpoints/.saving-x` is a link to a folder elsewhere",
        "parameters-torn-out": "`vector_to_parameters`, `p.data = …`, `set_` or `model.head.double().float()`",
        "read-in-a-list": "`torch.cat([p])`, `torch._foreach_norm(parameters)` or `torch.sum(input=p)` of freed parameters",
        "edit-in-a-list": "`torch._foreach_mul_(parameters, 0.5)` right after a step",
        "gradient-is-none": "an `autograd.Function` returns None as a weight's gradient, or a unit leaves out one of its layers",
        "tiles-in-graphs": "modules compute in tiles (`tile`) in units that are CUDA graphs",
        "nan-on-one-rank": "one NaN on one rank, in `shardwise train`",
        "nan-unit": "one NaN: which unit had it first",
        "nan-checkpoints": 'trains on after a NaN (`nonfinite = "warn"`): the last finite checkpoint',
        "checkpoints-gone": "resumes a run whose checkpoints are missing, empty or all damaged",
        "checkpoint-damaged": "resumes where the newest checkpoint is damaged but has the right size",
        "second-job": "starts a second job in the same run folder",
        "user-timeout": "gives `init_process_group` a time-out",
        "stopped-rank": "a rank stops answering",
        "hangup": "closes the terminal (SIGHUP)",
        "disk-error": "the disk fails once (EIO) while a checkpoint is written",
        "disk-full": "the disk is full while a checkpoint is written",
        "ranks-learning-rate": "ranks have different learning rates",
        "ranks-optimizer-class": "ranks have different optimizer classes",
        "ranks-optimizer-options": "ranks have different optimizer options",
        "ranks-buffers-order": "ranks have their buffers in a different order",
        "ranks-buffers-shape": "ranks have buffers of different shapes",
        "backward-raised": "catches an exception of `backward`, then calls `optimizer.step()`",
        "wrapped-in-ddp": "wraps a prepared model in torch DDP",
        "prepared-inside": "prepares a model that holds a prepared one",
        "float64-model": "prepares a float64 model with the default precision",
        "gathers-swapped": "two gathers of equal size are swapped below the engine",
        "import-from-here": "runs `shardwise profile` in a folder with a file named `torch.py`",
        "rank-exits-with-0": "a rank ends early with exit code 0",
        "boxes-do-not-cover": "loads a checkpoint whose parts do not cover a tensor",
        "not-a-regular-file": "loads a checkpoint whose manifest is a FIFO or `/dev/zero`",
        "ipv6-address": "sets `MASTER_ADDR=::1`",
        "silent-listener": "another program holds the port and never answers",
        "view-of-parameter": "keeps a view of a parameter on the model: a buffer, an attribute, a frozen parameter",
        "gradient-before-prepare": "calls `prepare` with gradients that a backward has left",
        "parameter-class": "trains a subclass of `nn.Parameter`, with an optimizer that reads attributes of parameters",
        "scripted": "prepares a model with `torch.jit.script` or `torch.jit.trace` modules",
        "bench-values": "changes values in `bench.json`, then makes a report of it",
    },
}
CASES = {case: does for cases in LISTS.values() for case, does in cases.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a test says of a case. `under`: the strategies, launchers … of which it is true."""

    case: str
    outcome: str
    under: tuple[str, ...] = ()


# Parameters of tests that are worth a word on the page.
_UNDER = ("strategy", "launcher", "backend")


def claims(item: pytest.Item) -> list[Claim]:
    """What the item's markers say. UsageError for a marker that is not strictly `ledger(id, outcome=…, under=…)`."""
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    parametrised = tuple(str(params[name]) for name in _UNDER if name in params)
    found = []
    for mark in item.iter_markers("ledger"):
        try:
            claim = _claim(*mark.args, **mark.kwargs)
        except (TypeError, ValueError) as error:
            raise pytest.UsageError(f"{item.nodeid}: ledger{mark.args}: {error}") from error
        found.append(claim if claim.under else Claim(case=claim.case, outcome=claim.outcome, under=parametrised))
    if sum(claim.outcome != "right" for claim in found) > 1:
        raise pytest.UsageError(f"{item.nodeid}: the lines of a test are those of one case; split the test")
    return found


def _claim(case: str, *, outcome: str, under: tuple[str, ...] = ()) -> Claim:
    if case not in CASES:
        raise ValueError("no case of tests/reliability/ledger.py")
    if outcome not in OUTCOMES:
        raise ValueError(f"the outcome is one of {', '.join(OUTCOMES)}")
    return Claim(case=case, outcome=outcome, under=under)
