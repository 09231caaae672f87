"""Who runs next: one file per order, one per batching mode."""
