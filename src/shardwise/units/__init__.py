"""Cut a torch model into units, and give a model of the meta device real weights."""

from shardwise.units.unit_modules import called_modules, model_spec, unit_modules

__all__ = ["called_modules", "model_spec", "unit_modules"]
