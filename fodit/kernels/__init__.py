"""Kernels: the compiled library of signaling products and its binding to torch, and fused row operations."""
