"""The package's version, in a place from which every layer can import it."""

__version__ = "0.1.0"
