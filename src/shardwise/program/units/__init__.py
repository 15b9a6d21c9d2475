"""Cut a torch model into units, and give a model of the meta device real weights."""

from shardwise.program.units.unit_modules import CutModel, called_modules, cut_model, model_spec, unit_modules

__all__ = ["CutModel", "called_modules", "cut_model", "model_spec", "unit_modules"]
