"""The rules of a step: trigger → operations."""
