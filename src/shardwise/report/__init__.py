"""Step 5 of 5: what the program says, drawn for people. No torch here; text comes as lines, colours are the CLI's."""
