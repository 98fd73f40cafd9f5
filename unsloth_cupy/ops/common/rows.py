"""The number of threads per row in kernels that reduce along rows."""


def spread(count: int, clusters: bool) -> tuple[int, int]:
    """Return the threads of a block, and the blocks, that share a row of ``count`` threads.

    ``clusters``: the GPU has clusters of blocks, as from sm_90 on.

    count <= 32           a power of two of threads; several rows per block, no barrier
    count <= 512          one block per row
    more, sm_90           2, 4 or 8 blocks of up to 512 threads in a cluster; then 8 of up to 1024
    more, before sm_90    one block of up to 1024 threads
    """
    if count <= 32:  # within a warp, which needs no barrier
        return 1 << (count - 1).bit_length(), 1
    sizes = (1, 2, 4, 8) if clusters else (1,)
    cluster = next((size for size in sizes if count <= 512 * size), sizes[-1])
    return min(1024, -(-count // (32 * cluster)) * 32), cluster


def held_rows(columns: int, most: int, lanes: int, clusters: bool) -> dict[str, int]:
    """Return the constants of a kernel that holds rows in registers, ``most`` values per thread.

    A thread reads 16 values of a row: two 16-byte accesses of 16-bit dtypes in flight, four of
    float32.  If 512 threads are too few for that, each reads up to ``most`` values.

        columns <= 512       a power of two of threads per row, several rows per block: no barrier
        columns <= 8192      one block per row; 512 threads hold up to 512 * most values
        more, sm_90          2, 4 or 8 such blocks in a cluster; then 8 of 1024 threads, which hold
                             8192 * most
        more, before sm_90   one block of 1024 threads: 1024 * most
        longer rows          are read twice; in clusters fewer rows are processed at a time, so that
                             they are still in L2 when they are read again
    """
    count = max(min(512, -(-columns // 16)), -(-columns // most))
    row_threads, cluster = spread(count, clusters)
    threads = row_threads if row_threads > 32 else 128  # 128: 4 rows or more in a block
    values = -(-columns // (cluster * row_threads * lanes)) * lanes
    return {
        "COLUMNS": columns,
        "LANES": lanes,
        "ROW_THREADS": row_threads,
        "THREADS": threads,
        "CLUSTER": cluster,
        "RESIDENT": max(1, 1024 // threads),  # blocks of an SM: 64 registers per thread
        "KEEP": values <= most,
    }
