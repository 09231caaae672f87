"""A continuous-batching engine over a paged KV cache: plan, run, commit."""
