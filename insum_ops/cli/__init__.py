"""`python -m insum_ops`: a demonstration, and what this machine can do.

demo    four statements beside plain torch
doctor  versions, devices, caches, and whether a kernel runs
"""
