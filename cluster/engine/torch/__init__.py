"""The embedded backend: transformers models over our paged attention, on torch."""
