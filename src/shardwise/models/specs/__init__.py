"""Specs of models: shipped with the package, by laws of an architecture, kept from an earlier trace, or traced now.

shipped        catalogue models, traced beforehand (ready/)
architecture   configs of the transformers library, by laws of their sizes (architectures/)
kept           a cache of traced specs
traced         the spec of a task
ship, ship_architectures    make what is shipped
"""
