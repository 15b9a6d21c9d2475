"""Step 5 of 5: draws the step program and its costs, as text and as HTML pages. No torch here."""
