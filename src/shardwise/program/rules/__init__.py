"""The rules of a step: trigger → operations. One set for each engine; `build.rules_of` returns that of a plan."""
