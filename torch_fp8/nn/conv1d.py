"""`Float8Conv1D`: GPT-2's linear layer, whose weight is stored transposed, with FP8 GEMMs.

``transformers.pytorch_utils.Conv1D`` computes ``y = x w + b`` with a weight (K, N). It runs the
three GEMMs of a linear layer with the weight's layouts swapped: fprop reads the transpose, dgrad
the weight as it is stored, and wgrad computes ``x^T g`` (K, N), with its operands exchanged.
"""

from torch import Tensor

from torch_fp8.nn.linear import Float8Layer


class Float8Conv1D(Float8Layer):
    """Mixin of a converted Conv1D, in front of its own class.

    It is not an ``nn.Linear``, because PEFT and others infer the weight's layout from the class.

    Shapes: x (..., K), weight (K, N), bias (N,), output (..., N).
    """

    nf: int
    fp8_transposed = True

    @property
    def in_features(self) -> int:  # type: ignore[override]
        """Number of input features, K."""
        return self.weight.shape[0]

    @property
    def out_features(self) -> int:  # type: ignore[override]
        """Number of output features, N."""
        return self.weight.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(nf={self.nf}, nx={self.in_features}, fp8={self.fp8.recipe})"
