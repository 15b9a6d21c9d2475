"""Memory of a plan: what each row of its program allocates and frees, replayed. No torch."""
