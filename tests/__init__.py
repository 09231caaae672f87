"""Tests name the law they hold; see README for the commands that run them."""
