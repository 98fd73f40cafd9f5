"""Arrays of libraries without a door of their own: in, back, and refused inside of gradients."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.errors import FrameworkError

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "stacks.md"
DTYPES = ["float16", "bfloat16", "float32", "float64"]


def values(dtype):
    drawn = np.random.default_rng(0).standard_normal((2, 4, 8))
    return drawn.astype(getattr(ml_dtypes, dtype, dtype))


@pytest.mark.parametrize("library", ["tensorflow", "paddle", "mlx", "numba"])
def test_recipes_run(library):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not there: it is large, and in no extra")
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    (recipe,) = (block for block in blocks if block.startswith(f"# needs {library}\n"))
    subprocess.run([sys.executable, "-c", recipe], check=True)


@pytest.mark.filterwarnings("ignore")  # of the library, as it is imported and as it works
class TestTensorflow:
    @pytest.fixture(autouse=True)
    def _peer(self):
        self.tf = pytest.importorskip("tensorflow", reason="no extra has it: it is large")

    def tensors(self, dtype="float32"):
        return [self.tf.convert_to_tensor(array) for array in values(dtype)]

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_goes_in_and_comes_back(self, dtype):
        gate, up = self.tensors(dtype)
        actual = uc.swiglu(gate, up)
        assert isinstance(actual, self.tf.Tensor)
        assert (actual.dtype, actual.device) == (gate.dtype, gate.device)
        np.testing.assert_array_equal(actual.numpy(), uc.swiglu(*values(dtype)))
        np.testing.assert_array_equal(uc.swiglu(self.tf.Variable(gate), up), actual)
        y, h, rstd = uc.rms_norm_forward(gate, up[0])
        assert rstd.dtype == ("float64" if dtype == "float64" else "float32")
        assert (y.dtype, h.shape) == (gate.dtype, gate.shape)

    def test_is_refused_where_a_gradient_is_asked_for(self):
        tf, (gate, up) = self.tf, self.tensors()
        variable = tf.Variable(up)
        with tf.GradientTape() as tape:
            tape.watch(gate)
            for inputs in ((gate, up), (up, gate), (up, variable), (gate * 2, up)):
                with pytest.raises(
                    FrameworkError, match=r"watched by tf.GradientTape.*custom_grad"
                ):
                    uc.swiglu(*inputs)
            assert uc.swiglu(up, tf.stop_gradient(gate)).shape == up.shape
            with tape.stop_recording():
                uc.swiglu(gate, up)
        with (
            tf.autodiff.ForwardAccumulator(gate, gate),
            pytest.raises(FrameworkError, match=r"gate is watched by ForwardAccumulator"),
        ):
            uc.swiglu(gate, up)
        with pytest.raises(
            FrameworkError, match=r"gate is a symbol of tf.function.*custom_gradient"
        ):
            tf.function(uc.swiglu, autograph=False)(gate, up)
        with pytest.raises(FrameworkError, match=r"x is RaggedTensor.*dense"):
            uc.relu2(tf.ragged.constant([[1.0], [2.0, 3.0]]))

    def test_does_not_mix(self):
        gate, up = self.tensors()
        with pytest.raises(FrameworkError, match=r"gate from tensorflow .*, up from numpy cpu"):
            uc.swiglu(gate, up.numpy())


@pytest.mark.filterwarnings("ignore")
class TestPaddle:
    @pytest.fixture(autouse=True)
    def _peer(self):
        self.paddle = pytest.importorskip("paddle", reason="no extra has it: it is large")

    def tensors(self, dtype="float32"):
        return [self.paddle.to_tensor(values("float32")[i]).astype(dtype) for i in (0, 1)]

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_goes_in_and_comes_back(self, dtype):
        gate, up = self.tensors(dtype)
        actual = uc.swiglu(gate, up)
        assert isinstance(actual, self.paddle.Tensor)
        assert (actual.dtype, str(actual.place)) == (gate.dtype, str(gate.place))
        expected = uc.swiglu(*values("float32").astype(getattr(ml_dtypes, dtype, dtype)))
        np.testing.assert_array_equal(actual.astype("float64"), expected.astype("float64"))
        turned = uc.swiglu(gate.T, up.T)
        np.testing.assert_array_equal(turned.T.astype("float64"), expected.astype("float64"))

    def test_is_refused_where_a_gradient_is_asked_for(self):
        gate, up = self.tensors()
        gate.stop_gradient = False
        for inputs in ((gate, up), (up, gate), (gate * 2, up)):
            with pytest.raises(FrameworkError, match=r"requires a gradient.*PyLayer"):
                uc.swiglu(*inputs)
        assert uc.swiglu(gate.detach(), up).stop_gradient
        with self.paddle.no_grad():
            assert uc.swiglu(gate, up).stop_gradient

    def test_does_not_mix(self):
        gate, up = self.tensors()
        with pytest.raises(FrameworkError, match=r"gate from paddle.*, up from numpy cpu"):
            uc.swiglu(gate, up.numpy())


class TestMlx:
    @pytest.fixture(autouse=True)
    def _peer(self):
        self.mx = pytest.importorskip("mlx.core", reason="no extra has it: it is Apple's")

    def arrays(self, dtype="float32"):
        return [self.mx.array(array).astype(getattr(self.mx, dtype)) for array in values("float32")]

    @pytest.mark.parametrize("dtype", DTYPES[:3])
    def test_goes_in_and_comes_back(self, dtype):
        gate, up = self.arrays(dtype)
        actual = uc.swiglu(gate, up)
        assert isinstance(actual, self.mx.array)
        assert actual.dtype == gate.dtype
        expected = uc.swiglu(*values("float32").astype(getattr(ml_dtypes, dtype, dtype)))
        wide = np.asarray(actual.astype(self.mx.float32))
        np.testing.assert_array_equal(wide, expected.astype("float32"))
        assert uc.swiglu(gate.T * 1, up.T).shape == gate.shape[::-1]

    def test_is_refused_where_a_gradient_is_asked_for(self):
        mx, (gate, up) = self.mx, self.arrays()
        seen = []

        def loss(gate):
            for inputs in ((gate, up), (up, gate), (gate * 2, up)):
                with pytest.raises(FrameworkError, match=r"traced by mx.grad.*mx.custom_function"):
                    uc.swiglu(*inputs)
            seen.append(uc.swiglu(up * 1, up).shape)
            return gate.sum()

        mx.eval(mx.grad(loss)(gate), mx.jvp(loss, (gate,), (gate,))[1])
        assert seen == [up.shape] * 2
        for wrap in (mx.compile, mx.vmap):
            with pytest.raises(FrameworkError, match=r"gate is traced by mx.compile or mx.vmap"):
                wrap(uc.swiglu)(gate, up)

    def test_does_not_mix(self):
        gate, up = self.arrays()
        with pytest.raises(FrameworkError, match=r"gate from mlx, up from numpy cpu"):
            uc.swiglu(gate, np.asarray(up))


@pytest.mark.slow
def test_none_of_them_is_imported_with_the_library():
    names = "{'tensorflow', 'paddle', 'mlx', 'numba'}"
    program = f"import sys, unsloth_cupy; assert not {names} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True)
