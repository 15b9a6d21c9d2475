"""Checks around the core: misuse of prepared objects, foreign writes, ranks that do different things."""
