"""Safe reading and writing of files, and one validator for what they hold. No torch here."""
