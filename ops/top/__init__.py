"""`forebay top`: the running cluster in a terminal."""
