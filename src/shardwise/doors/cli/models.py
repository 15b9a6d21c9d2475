"""`shardwise models`: the catalogue."""

import dataclasses
import json

from shardwise.doors.cli.shared_options import AsJson
from shardwise.models.catalogue import CATALOGUE
from shardwise.models.shapes import LlamaShape, ResNetShape, Shape, TransformersShape, ViTShape


def models(as_json: AsJson = False) -> None:
    """List the models of the catalogue: parameters and dimensions."""
    if as_json:
        rows = {
            name: {"num_params": shape.num_params, **dataclasses.asdict(shape)} for name, shape in CATALOGUE.items()
        }
        print(json.dumps(rows, indent=2))
        return
    from rich.console import Console

    from shardwise.measure.report.text.plain_table import plain_table

    heads = ("model", "parameters", "layers × width, heads, input")
    table = plain_table(heads, right=heads[1:2], wraps=heads)
    for name, shape in CATALOGUE.items():
        table.add_row(name, f"{shape.num_params:,}", _dimensions(shape))
    Console().print(table)


def _dimensions(shape: Shape) -> str:
    if isinstance(shape, ResNetShape):
        return f"{'+'.join(map(str, shape.num_blocks))} {shape.block} blocks × {shape.width}, {shape.image_size} pixels"
    if isinstance(shape, TransformersShape):
        layers, width, heads = (
            shape.config[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
        )
        kv_heads = shape.config.get("num_key_value_heads", heads)
        return f"{layers} × {width}, {heads}/{kv_heads} heads, {shape.max_seq} tokens (transformers)"
    heads = f"{shape.num_heads}/{shape.num_kv_heads}" if isinstance(shape, LlamaShape) else f"{shape.num_heads}"
    if isinstance(shape, ViTShape):
        size = f"{shape.image_size} pixels / {shape.patch_size}"
    else:
        size = f"{shape.max_seq} tokens"
    return f"{shape.num_layers} × {shape.width}, {heads} heads, {size}"
