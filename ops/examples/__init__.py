"""Scripts that show one thing each against a running Forebay."""
