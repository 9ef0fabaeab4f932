"""Statement and device in, decisions out: what a GPU can do, what a kernel would take of it, when an arrangement pays.

`device` describes a GPU, `footprint` says what a config would occupy of it, `block_rows` how rows of blocks are taken.
"""
