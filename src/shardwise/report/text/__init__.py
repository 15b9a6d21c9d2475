"""Tables and pictures for the terminal: lines of text, colours are the CLI's."""
