"""What every room may import, and what imports no room: errors, shared words, files, and torch's private names.

errors.py          the errors of the package, each with one line for the user
vocabulary/        dtypes, layouts, memory categories, number formats
files/             safe reading and writing, and one validator for what files hold
torch_internals/   the private names of torch that the package uses; the only floor that imports torch
"""
