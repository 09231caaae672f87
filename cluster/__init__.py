"""What runs on the nodes and across them: the engine, the decisions, and the values that pass between processes."""
