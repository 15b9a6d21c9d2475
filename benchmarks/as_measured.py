"""Language models as they were when the rows of results/step_times_h200*.json and validate_memory_*.json were measured:
their vocabularies not padded, trained with the usual loss. Once these are measured again, `Source` itself will do.
"""

from collections.abc import Collection
from dataclasses import replace

from shardwise.models.catalogue import CATALOGUE, shape_of
from shardwise.models.shapes import GPTShape, LlamaShape
from shardwise.sources import Source, Way
from shardwise.spec import ModelSpec
from shardwise.tasks import cross_entropy, token_task


def source_as_measured(model: str, *, seq: int | None = None, image: int | None = None) -> Source:
    """The source of a row's model. Of MPT, and of what is not in the catalogue, nothing has changed."""
    if isinstance(CATALOGUE.get(model), GPTShape | LlamaShape) and not model.startswith("mpt-"):
        return _Unpadded(model, seq=seq)
    return Source(model, seq=seq, image=image)


class _Unpadded(Source):
    """Traced here, since the specs that come with the package are of the padded models."""

    def _is_ready(self) -> bool:
        return False

    def _live(self, ways: Collection[Way]) -> ModelSpec:
        if self._task is None:
            shape = shape_of(self.reference)
            assert isinstance(shape, GPTShape | LlamaShape)
            task = token_task(replace(shape, vocab_multiple=1), seq=self._seq, device="meta")
            self._task = replace(task, loss=cross_entropy)
        return super()._live(ways)
