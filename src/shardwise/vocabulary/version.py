"""The package's version, where every layer can import it."""

__version__ = "0.1.0"
