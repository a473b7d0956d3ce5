"""A file for each module of families: tiny models, which the contract tests find, and tests of what is special."""
