"""Forebay on Ray: the three Serve deployments, their links, and the command that starts them."""
