"""Run as a program: prints, as JSON, what an import of this package and a prepared model change in a process.

imported   changed by importing every module of the package
prepared   functions and hooks changed while a prepared model is alive
deleted    the same, once it and its optimizer have been collected
"""

import gc
import importlib
import json
import os
import pkgutil
import signal
import sys
import threading
import types
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

# What torch, and the libraries that we integrate with, would otherwise import during the comparison.
_LOADED_FIRST = [
    *("torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.fsdp", "torch.distributed.checkpoint"),
    *("torch.nn.utils.clip_grad", "torch.profiler", "torch.fx.experimental.proxy_tensor"),
    *("transformers.trainer", "accelerate", "lightning.pytorch", "datasets"),
]
_HOOK_TABLES = {"torch.nn.modules.module": "_global_", "torch.optim.optimizer": "_global_"}

State = dict[str, Any]


def state() -> State:
    """Every attribute of torch's modules and classes, torch's global hooks, and what a process has one of."""
    found: State = {f"os.environ[{name}]": value for name, value in os.environ.items()}
    found |= {f"signal {number}": signal.getsignal(number) for number in signal.valid_signals()}
    found |= {f"filter {number}": value for number, value in enumerate(warnings.filters)}
    found |= {"sys.excepthook": sys.excepthook, "threading.excepthook": threading.excepthook}
    found |= {f"sys.meta_path {number}": finder for number, finder in enumerate(sys.meta_path)}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch" and isinstance(module, types.ModuleType):
            found |= _attributes(name, module)
            for kind in [value for value in list(vars(module).values()) if isinstance(value, type)]:
                if kind.__module__.partition(".")[0] == "torch":
                    found |= _attributes(f"{kind.__module__}.{kind.__qualname__}", kind)
    for name, prefix in _HOOK_TABLES.items():
        for table, hooks in list(vars(sys.modules[name]).items()):
            if table.startswith(prefix) and isinstance(hooks, dict):
                found |= {f"{name}.{table}[{number}]": hook for number, hook in hooks.items()}
    return found


def _attributes(name: str, owner: Any) -> State:
    return {f"{name}.{attribute}": value for attribute, value in list(vars(owner).items())}


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The names of what is another object now, is gone, or is new; not the modules that were imported."""
    names = [name for name in before if name not in after or not _same(before[name], after[name])]
    owners = {name.rpartition(".")[0] for name in before}
    new = [name for name in after if name not in before and name.rpartition(".")[0] in owners]
    return sorted(names + [name for name in new if not isinstance(after[name], types.ModuleType)])


def _same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, str | tuple) and isinstance(other, type(one)) and one == other)


def functions_changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The names of changed functions; torch's other variables are counters and settings that change as it runs."""
    return [name for name in changed(before, after) if callable(before.get(name, after.get(name)))]


def import_all() -> None:
    """Import every module of the package; those of a library that is not installed are left out."""
    import shardwise

    for info in pkgutil.walk_packages(shardwise.__path__, "shardwise."):
        if not info.name.endswith(".__main__"):
            try:
                importlib.import_module(info.name)
            except ModuleNotFoundError as error:
                if str(error.name).partition(".")[0] in ("shardwise", "torch"):
                    raise


def while_prepared() -> State:
    """The state while a model is prepared, and steps."""
    from shardwise import Plan, prepare
    from shardwise.comm.job.absent import AbsentCollectives

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    prepare(model, optimizer, Plan(strategy="fsdp", units="class:Linear"), collectives=AbsentCollectives())
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return state()


def main() -> None:
    for name in _LOADED_FIRST:
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)
    # torch wraps the step of an optimizer's class when the first one is made.
    torch.optim.AdamW([torch.zeros(1)])
    before = state()
    import_all()
    found = {"imported": changed(before, state())}

    from shardwise.comm.job.absent import absent_group

    # With a folder for its record, a failing rank writes one from sys.excepthook.
    os.environ["SHARDWISE_AUTOPSY"] = os.devnull
    # torch replaces sys.excepthook with every group.
    with absent_group(1):
        before = state()
        found["prepared"] = functions_changed(before, while_prepared())
        gc.collect()
        found["deleted"] = functions_changed(before, state())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
