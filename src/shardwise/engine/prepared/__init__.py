"""Functions for a prepared model: state dicts, clipping, accumulation, an inventory of its memory."""
