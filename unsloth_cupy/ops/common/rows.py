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
