"""Another plan, or more parameters, for a model that is being trained."""
