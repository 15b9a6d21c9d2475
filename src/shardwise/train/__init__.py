"""Training: one rank's work (config, run) and how ranks are started, joined and ended (launch, join, failure)."""
