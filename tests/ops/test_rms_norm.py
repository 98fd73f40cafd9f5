from ..parity import Case, KernelParity


class TestRMSNorm(KernelParity):
    op = "rms_norm_forward"
    cases = (
        Case("one row", rows=[], hidden=32),
        Case("no rows", rows=[0], hidden=8),
        Case("no columns", rows=[2], hidden=0),
        Case("odd width", rows=[2, 3], hidden=201),
        Case("one column", rows=[3], hidden=1),
        Case("seven columns", rows=[900], hidden=7, given=["bias"]),
        Case("large eps", rows=[5], hidden=64, eps=1.0),
        Case("residual", rows=[4], hidden=130, given=["residual"]),
        Case("all", rows=[2, 5], hidden=64, given=["residual", "bias"], offset=1.0),
        Case("blocks that walk rows", rows=[2, 70], hidden=128, given=["residual", "bias"]),
    )


class TestRMSNormLongRows(KernelParity):
    op = "rms_norm_forward"
    cases = (
        Case("a block a row", rows=[7], hidden=2048, given=["bias"]),
        Case("a ragged block a row", rows=[3], hidden=4104, given=["residual"]),
        Case("forward in registers", rows=[6], hidden=16896, given=["residual", "bias"]),
        Case("read twice", rows=[1], hidden=131072),
    )
    test_any_strides = None  # NumPy adds pairwise along contiguous axes only: 4 eps do not hold
