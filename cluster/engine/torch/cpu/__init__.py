"""The embedded engine on a CPU: kernels compiled by numba, and the decoder and attention made of them."""
