"""The names that a package imports at their first use: the imports for type checkers in its `__init__.py` list them."""

from functools import cache


@cache
def lazy_names(init: str) -> dict[str, str]:
    """Return name → module of the imports under `if TYPE_CHECKING` in a file."""
    import ast
    from pathlib import Path

    (block,) = (node for node in ast.parse(Path(init).read_bytes()).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}
