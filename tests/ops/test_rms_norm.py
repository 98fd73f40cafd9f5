from ..parity import Case, Parity


class TestRMSNorm(Parity):
    op = "rms_norm_forward"
    cases = (
        Case("one row", rows=[], hidden=32),
        Case("no rows", rows=[0], hidden=8),
        Case("odd width", rows=[2, 3], hidden=201),
        Case("one column", rows=[3], hidden=1),
        Case("large eps", rows=[5], hidden=64, eps=1.0),
        Case("residual", rows=[4], hidden=130, given=["residual"]),
        Case("all", rows=[2, 5], hidden=64, given=["residual", "bias"], offset=1.0),
    )
