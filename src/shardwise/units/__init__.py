"""A torch model cut into units, and made real from the meta device."""

from shardwise.units.unit_modules import called_modules, model_spec, unit_modules

__all__ = ["called_modules", "model_spec", "unit_modules"]
