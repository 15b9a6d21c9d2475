"""Importing the package changes nothing of torch or of the process; nor does a prepared model that is gone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(200)

# What has to intercept calls that no prepared object sees, for as long as there is a prepared model.
_WHILE_PREPARED = {
    "sys.excepthook",
    "torch.OutOfMemoryError.__init__",
    "torch.amp.grad_scaler.GradScaler._unscale_grads_",
    "torch.amp.grad_scaler.GradScaler.step",
    "torch.nn.modules.module._global_module_registration_hooks[…]",
    "torch.nn.modules.module._global_parameter_registration_hooks[…]",
    "torch.nn.utils.clip_grad._clip_grads_with_norm_",
    "torch.optim.optimizer._global_optimizer_pre_hooks[…]",
}


@pytest.fixture(scope="module")
def changed() -> dict[str, list[str]]:
    program = Path(__file__).with_name("process_state.py")
    done = subprocess.run([sys.executable, "-W", "ignore", str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_importing_every_module_changes_nothing_of_torch_or_of_the_process(changed: dict[str, list[str]]) -> None:
    assert changed["imported"] == []


def test_torchs_functions_and_hooks_are_torchs_own_again_once_a_prepared_model_is_gone(
    changed: dict[str, list[str]],
) -> None:
    assert {f"{name.partition('[')[0]}[…]" if "[" in name else name for name in changed["prepared"]} == _WHILE_PREPARED
    assert changed["deleted"] == []
