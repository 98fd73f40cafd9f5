from ..parity import Case, KernelParity, Parity


class TestAdd(KernelParity):
    op = "add"
    cases = (Case("two axes", axes=[3, 5]), Case("empty", axes=[0]))


class TestMultiply(KernelParity):
    op = "multiply"
    cases = (Case("two axes", axes=[3, 5]), Case("scalar", axes=[]))


class TestScale(KernelParity):
    op = "scale"
    cases = (Case("two axes", axes=[3, 5], factor=0.3),)


class TestReshape(Parity):
    op = "reshape"
    cases = (Case("split", axes=[3, 4], shape=(3, 2, -1)),)


class TestColumns(Parity):
    op = "columns"
    cases = (Case("middle", rows=[3], columns=7, start=2, stop=5),)
