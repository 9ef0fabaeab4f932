"""Kernel maps: which voxel each voxel of a sparse convolution reads through each tap, built on any device.

A file imports only from those above it.

    geometry      how a convolution's coarse and fine cells lie
    grid          a batch of voxel grids: coordinates as keys, and what makes voxels wrong
    sort          neighbours and their pairs by torch's sort and search
    kernels       the kernels of the hash table
    pair_kernels  the kernels that count, group and swap pairs
    pairs         the pairs of a table of neighbours, counted, grouped and swapped
    tile_kernels  the kernels that sort rows into tiles
    tiles         rows that need the same taps, in tiles
    hash_table    neighbours by a hash table in the device's memory
    map_tables    the forms of a map that statements read: table, groups, tiles
    map_parts     a kernel map as an operator takes it, and the maps that are known by their voxels
    kernel_map    `KernelMap`: pairs of voxels, in every form that statements read
    map_building  `kernel_map`: voxels to such a map, or for a tracer to its parts
    map_operators torch operators that make kernel maps, for tracers, and the maps that they find again
"""
