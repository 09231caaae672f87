"""Grafana's dashboards, as code.

Owns: what they show. Imports Grafana's builders and the names of cluster.metrics; rendered files lie in the chart
(`python -m ops.dashboards`), and `forebay dashboards push` brings the same to a Grafana. Invariant: what is rendered is
the same on every machine.
"""
