"""Models of the catalogue with fewer blocks, for steps that take too long at full depth."""

from dataclasses import replace

from shardwise.models.catalogue import shape_of
from shardwise.models.tasks import Task, token_task


def smollm2_135m_of_1_block(seq: int) -> Task:
    return token_task(replace(shape_of("smollm2-135m"), num_layers=1), seq=seq, device="meta")
