"""What operators and engineers use: the command line, benchmarks, dashboards, the simulator."""
