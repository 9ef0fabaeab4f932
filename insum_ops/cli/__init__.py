"""`python -m insum_ops`: a demonstration, what this machine can do, and statements looked at without a program.

demo       four statements beside plain torch
doctor     versions, devices, caches, and whether a kernel runs
statement  `explain` and `tune` of a statement whose operands are given by shapes
cache      tuned configs: shown, cleared, written to a file and read from one

errors     what a command says when it can't be run
progress   bars for what takes over a second
operands   shapes on a command line to random operands
"""
