"""Forebay in virtual time: production's decisions, with a model of what a step costs in the place of a GPU."""
