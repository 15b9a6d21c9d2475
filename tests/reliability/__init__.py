"""What docs/reliability.md is made of, from the bottom up.

said.py       lines that a user would see, noted down where a test sees them
ledger.py     the cases, in the page's order; @pytest.mark.ledger ties tests to them
findings.py   what the marked tests of a run showed of each case
page.py       sections of the page, each written by its own command
page.md       the page without its sections
cost.py       the section about the cost of the checks, from the benchmark's results
recorder.py   `pytest --reliability`: the marked tests' findings go into the page

`make reliability` runs exactly the marked tests and writes the page.
"""
