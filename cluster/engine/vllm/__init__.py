"""The vLLM backend: vLLM's engine core under our order, our sampling and our text."""
