"""A prepared model carries its engine, ours or torch's, as an attribute; engines.py gives the lookups their types."""

from typing import Any

from torch import nn

from shardwise.base.errors import InvalidModel

# An attribute of the model, because a table of engines by model would keep the models alive.
_ATTRIBUTE = "_shardwise_engine"


def carry_engine(model: nn.Module, engine: object) -> None:
    """Make `engine` the engine of a model that it has prepared."""
    model.__dict__[_ATTRIBUTE] = engine


def drop_engine(model: nn.Module) -> None:
    """Take the engine off a model."""
    del model.__dict__[_ATTRIBUTE]


def find_engine(model: nn.Module) -> Any:
    """Return the engine of a model; None for one that was not prepared."""
    return model.__dict__.get(_ATTRIBUTE)


def require_engine(model: nn.Module) -> Any:
    """Return the engine of a model; raise InvalidModel for one that was not prepared."""
    engine = find_engine(model)
    if engine is None:
        raise InvalidModel(f"this {type(model).__name__} has not been through shardwise.prepare")
    return engine
