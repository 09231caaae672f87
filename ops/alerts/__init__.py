"""Alerts as code: what is wrong when, by which figures, and which page says what to do.

`python -m ops.alerts` renders them into helm/forebay/files/alerts.yaml, `forebay alerts` to standard output.
"""
