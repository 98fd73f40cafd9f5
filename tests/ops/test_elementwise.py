from ..harness.parity import Case, Parity


def positive(*shape):
    return lambda rng: rng.uniform(0.5, 2, shape)


def apart(*shape):
    """Return what draws numbers of either sign, none of them near 0."""
    return lambda rng: rng.uniform(0.5, 2, shape) * rng.choice([-1, 1], shape)


class TestSubtract(Parity):
    op = "subtract"
    cases = (Case("two axes", axes=[3, 5]), Case("scalar", axes=[]), Case("empty", axes=[0, 3]))


class TestDivide(Parity):
    op = "divide"
    cases = (
        Case("two axes", axes=[3, 5], arrays={"b": apart(3, 5)}),
        Case("empty", axes=[0, 3]),
    )


class TestPower(Parity):
    op = "power"
    cases = (
        Case("square", axes=[3, 5], exponent=2.0),
        Case("cube", axes=[7], exponent=3.0),
        Case("one", axes=[7], exponent=1.0),
        Case("none", axes=[7], exponent=0.0),
        Case("reciprocal", axes=[3, 5], exponent=-1.0, arrays={"x": apart(3, 5)}),
        Case("root", axes=[3, 5], exponent=0.5, arrays={"x": positive(3, 5)}),
        Case("empty", axes=[0, 3], exponent=-0.5),
    )


class TestExp(Parity):
    op = "exp"
    cases = (Case("two axes", axes=[3, 5]), Case("scalar", axes=[]), Case("empty", axes=[0, 3]))


class TestLog(Parity):
    op = "log"
    cases = (
        Case("two axes", axes=[3, 5], arrays={"x": positive(3, 5)}),
        Case("empty", axes=[0, 3]),
    )
