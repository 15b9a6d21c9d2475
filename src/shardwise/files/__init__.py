"""Files read and written safely, and the one way to check what they hold. No torch."""
