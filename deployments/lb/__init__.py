"""Load balancers before the routers: their configurations, filled with addresses. See ops/docs/load-balancers.md."""
