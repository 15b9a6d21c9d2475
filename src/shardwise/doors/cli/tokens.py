"""`shardwise tokens`: text files → a token file to train on."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from shardwise.base.errors import InvalidData


def tokens(
    inputs: Annotated[
        list[Path], Argument(metavar="FILE", help="Text files, .jsonl files, or folders of .txt and .jsonl.")
    ],
    out: Annotated[Path, Option(help="Write OUT.bin and OUT.idx.")],
    tokenizer: Annotated[
        Path | None, Option(help="A Hugging Face tokenizer.json (default: one token per byte).")
    ] = None,
    end_token: Annotated[str | None, Option(help="The tokenizer's token that ends a document.")] = None,
    force: Annotated[bool, Option("--force", help="Replace OUT if it exists.")] = False,
) -> None:
    """Make a memory-mapped token file (OUT.bin, OUT.idx) from text."""
    files = _files(inputs)
    for path in (out.with_name(out.name + ".bin"), out.with_name(out.name + ".idx")):
        if path.exists() and not force:
            raise InvalidData(f"{path} exists; --force replaces it")
    if end_token is not None and tokenizer is None:
        raise InvalidData("--end-token goes with --tokenizer; bytes end a document with byte 0")

    from rich.console import Console
    from rich.progress import track

    from shardwise.models.data.text import byte_encoding, encode_files, tokenizer_encoding
    from shardwise.models.data.tokens import write_tokens

    encoding = tokenizer_encoding(tokenizer, end_token=end_token) if tokenizer else byte_encoding()
    console = Console(stderr=True)
    progress = track(files, description="Encoding", console=console, disable=not console.is_terminal)
    pieces = encode_files(progress, encoding=encoding)
    written = write_tokens(out, pieces, vocab_size=encoding.vocab_size, tokenizer=encoding.name)
    print(
        f"{written.path}: {len(written.tokens):,} tokens in {len(written.document_ends):,} documents, "
        f"vocabulary {written.vocab_size:,}; train on it as tokens:{out}"
    )


def _files(inputs: list[Path]) -> list[Path]:
    files: list[Path] = []
    for path in inputs:
        if path.is_dir():
            found = sorted(file for suffix in (".txt", ".jsonl") for file in path.rglob(f"*{suffix}"))
            if not found:
                raise InvalidData(f"{path}: holds no .txt or .jsonl file; name other text files themselves")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise InvalidData(f"{path}: there is no such file or folder")
    return files
