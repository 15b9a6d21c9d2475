"""Words that the whole package shares: dtypes, layouts of flat buffers, memory categories, number formats. No torch."""
