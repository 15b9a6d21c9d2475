"""A bench on GPUs: every engine, with the wire and without. Its two ranks share one GPU here."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from shardwise.measure.bench.benchmark import Asked, bench
from shardwise.measure.bench.case import cases_of
from shardwise.measure.bench.contestants import ENGINES
from shardwise.measure.bench.modes import mode_of
from shardwise.training.config.config import TrainConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(590),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Runs in every new interpreter before anything else: each rank says that it is another host, and takes the first GPU. The
# process that ranks are usually forked from ends at once, so that they are new interpreters.
SHARE_THE_GPU = """
import os
import sys
if "RANK" in os.environ:
    os.environ.update(LOCAL_RANK="0", NCCL_HOSTID="host" + os.environ["RANK"])
elif "shardwise.training.launch.warm_process" in sys.orig_argv:
    os._exit(0)
"""


@pytest.fixture
def shared_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(SHARE_THE_GPU)
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), before))))


def installed(engine: str) -> bool:
    package = ENGINES[engine].package
    return not package or find_spec(package) is not None


# A minute each: the peers are measured with --whole.
OURS = ("shardwise", "torch")
PEERS = [
    pytest.param(engine, marks=pytest.mark.whole) for engine in ENGINES if engine not in OURS and installed(engine)
]


@pytest.mark.parametrize("engine", [*OURS, *PEERS])
@pytest.mark.usefixtures("shared_gpu")
def test_both_strategies_are_measured_and_train_alike(engine: str, tmp_path: Path) -> None:
    config = TrainConfig.from_dict(
        {
            "task": {"model": "gpt-tiny", "dataset": "random", "seq": 64},
            "plan": {"micro_batch": 4, "precision": "bf16"},
            "optimizer": {"fused": True},
            "train": {"steps": 10},
            "run": {"device": "cuda", "folder": str(tmp_path / "run")},
        }
    )
    both = cases_of(config, engines=[engine], strategies=("ddp", "fsdp"))
    cases = [case for case in both if case.why_not != "deepspeed has no ddp"]
    asked = Asked(
        config=config, cases=cases, num_ranks=2, folder=tmp_path / "out", name="", command="", rounds=1, steps=4
    )
    found = bench(asked)
    assert found.equivalence.agrees, found.equivalence
    for result in found.cases:
        assert result.ran, (result.name, result.why_not)
        assert result.step_seconds is not None
        assert result.silent_seconds is not None
        assert result.peak_bytes
        assert result.sent_bytes
        if mode_of(engine) == "eager":
            assert result.ledgers
