"""Kernel maps: which voxel each voxel of a sparse convolution reads through each tap, built on any device.

geometry      how coarse and fine cells lie
fixed_kernel  a fixed Triton kernel, launched with little around it
kernels       the kernels that look voxels up
sort          the same with torch's sort and search
hash_table    a hash table of voxels
grid          a dense grid of voxels
pair_kernels  the kernels that list pairs
pairs         the pairs of a map, listed by tap
tile_kernels  the kernels that sort rows into tiles
tiles         rows that need the same taps, in tiles
map_tables    a map in groups and tiles
kernel_map    `kernel_map` and the class `KernelMap`
"""
