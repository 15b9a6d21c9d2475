"""benchmarks/training_case.py: what is measured is cut into the units that are predicted."""

from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.fsdp import FSDPModule

from shardwise.comm.job.absent import absent_group
from shardwise.program.units import unit_modules

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAME = "qwen3-0.6b"


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_fully_shard_has_the_same_units_with_recomputation(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(BENCHMARKS)
    import hugging_face_models as models
    from training_case import Case, set_up

    values = {**models.MODELS[NAME].values, **models.TINY, "tie_word_embeddings": False}
    small = replace(models.MODELS[NAME], tokens=8, values=values)
    for table in (models.MODELS, models._ALL):
        monkeypatch.setitem(table, NAME, small)
    monkeypatch.setitem(unit_modules.__globals__, "LARGE_ROOT_LAYER", 1000)
    units = list(unit_modules(models.make_model(NAME, device="meta")))
    assert {"model.embed_tokens", "lm_head"} < set(units)
    with absent_group(2):
        case = Case(model=NAME, batch=1, engine="torch", num_ranks=2, recompute=recompute, optimizer="sgd")
        training = set_up(case, device="cpu", made_on="cpu")
        training.step()
    sharded = [name for name, module in training.model.named_modules() if isinstance(module, FSDPModule)]
    assert sharded == ["", *units[1:]]
