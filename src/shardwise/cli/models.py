"""`shardwise models`: the catalogue."""

import dataclasses
import json
from typing import Annotated

import typer

from shardwise.models.catalogue import CATALOGUE
from shardwise.models.shapes import GPTShape, LlamaShape, ResNetShape, Shape, ViTShape


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """List the models of the catalogue: parameters and dimensions."""
    if as_json:
        rows = {
            name: {"num_params": shape.num_params, **dataclasses.asdict(shape)} for name, shape in CATALOGUE.items()
        }
        print(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("model")
    table.add_column("parameters", justify="right")
    table.add_column("layers × width, heads, input")
    for name, shape in CATALOGUE.items():
        table.add_row(name, f"{shape.num_params:,}", _dimensions(shape))
    Console().print(table)


def _dimensions(shape: Shape) -> str:
    match shape:
        case GPTShape():
            return f"{shape.num_layers} × {shape.width}, {shape.num_heads} heads, {shape.max_seq} tokens"
        case LlamaShape():
            heads = f"{shape.num_heads}/{shape.num_kv_heads} heads"
            return f"{shape.num_layers} × {shape.width}, {heads}, {shape.max_seq} tokens"
        case ViTShape():
            pixels = f"{shape.image_size} pixels / {shape.patch_size}"
            return f"{shape.num_layers} × {shape.width}, {shape.num_heads} heads, {pixels}"
        case ResNetShape():
            blocks = "+".join(map(str, shape.num_blocks))
            return f"{blocks} {shape.block} blocks × {shape.width}, {shape.image_size} pixels"
