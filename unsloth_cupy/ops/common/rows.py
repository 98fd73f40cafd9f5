"""How threads share rows that a kernel reduces along."""


def spread(wanted: int, clusters: bool) -> tuple[int, int]:
    """Return how many threads of a block share a row that wants so many, and how many blocks do.

    Clusters of blocks begin with sm_90.

    <= 32            a power of two of threads; several rows a block, no barrier
    <= 512           the block takes a row
    beyond, sm_90    2, 4 or 8 such blocks in a cluster; then 8 of 1024 threads
    beyond, before   1024 threads
    """
    if wanted <= 32:
        return 1 << (wanted - 1).bit_length(), 1
    sizes = (1, 2, 4, 8) if clusters else (1,)
    cluster = next((size for size in sizes if wanted <= 512 * size), sizes[-1])
    return min(1024, -(-wanted // (32 * cluster)) * 32), cluster


def held_rows(columns: int, most: int, lanes: int, clusters: bool) -> dict[str, int]:
    """Return the constants of rows that threads hold, each ``most`` values of one.

    A thread takes 16 values of a row: two 16-byte accesses of 16-bit dtypes in flight, four of
    float32.  Where a block of 512 threads does not do, they take ``most``.

        columns <= 512     a power of two of threads a row, several rows a block: no barrier
        columns <= 8192    the block takes a row; 512 threads take up to 512 * most
        beyond, sm_90      2, 4 or 8 such blocks in a cluster; then 8 of 1024 threads, which take
                           8192 * most
        beyond, before     1024 threads: 1024 * most
        else               rows are read twice; the cluster is there so that fewer of them are
                           under way at a time, and they lie in L2 yet
    """
    wanted = max(min(512, -(-columns // 16)), -(-columns // most))
    row_threads, cluster = spread(wanted, clusters)
    threads = row_threads if row_threads > 32 else 128
    values = -(-columns // (cluster * row_threads * lanes)) * lanes
    return {
        "COLUMNS": columns,
        "LANES": lanes,
        "ROW_THREADS": row_threads,
        "THREADS": threads,
        "CLUSTER": cluster,
        "RESIDENT": max(1, 1024 // threads),
        "KEEP": values <= most,
    }
