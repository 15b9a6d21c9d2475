"""Specs of models: shipped with the package, by laws of an architecture, kept from an earlier trace, or traced now.

spec_request   what a spec depends on
spec_store     finds a spec in any of these ways, and keeps it; catalogue models are traced beforehand (ready/)
architecture   configs of the transformers library, by laws of their sizes (architectures/)
kept           a cache of traced specs
states_only    of a number of parameters
traced         the spec of a task
ship, ship_architectures    make what is shipped
"""
