"""Names of the modules that make logits, in the models of this package and of others."""

HEADS = ("lm_head", "head", "embed_out")
